"""Finds nodes and proxies by what the cluster already has: Kubernetes' EndpointSlices, or etcd."""
