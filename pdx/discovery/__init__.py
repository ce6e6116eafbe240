"""Where nodes and proxies are, by what the cluster already has: Kubernetes' EndpointSlices, or etcd."""
