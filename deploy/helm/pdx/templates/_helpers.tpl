{{- define "pdx.name" -}}{{ .Release.Name }}{{- end -}}

{{- define "pdx.labels" -}}
app.kubernetes.io/name: pdx
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- /* Of (dict "root" $ "part" "proxy"). */ -}}
{{- define "pdx.selector" -}}
app.kubernetes.io/name: pdx
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end -}}

{{- /* The name of a pod of a StatefulSet by DNS: (dict "root" $ "part" … "number" …). Hosts are compared as written. */ -}}
{{- define "pdx.host" -}}
{{ include "pdx.name" .root }}-{{ .part }}-{{ .number }}.{{ include "pdx.name" .root }}-{{ .part }}.{{ .root.Release.Namespace }}.svc
{{- end -}}

{{- /* An IP address before a port: (dict "root" $ "ip" …). */ -}}
{{- define "pdx.ip" -}}{{ ternary (printf "[%s]" .ip) .ip .root.Values.ipv6 }}{{- end -}}

{{- define "pdx.proxies" -}}
{{- $all := list -}}
{{- range $number := until (int .Values.proxy.replicas) -}}
{{- $all = append $all (printf "tcp://%s:7600" (include "pdx.host" (dict "root" $ "part" "proxy" "number" $number))) -}}
{{- end -}}
{{ join "," $all }}
{{- end -}}

{{- define "pdx.key" -}}
{{ required (printf "keys: no public key of %s; deploy/keys.sh makes them" .name) (get .root.Values.keys .name) }}
{{- end -}}

{{- define "pdx.podSecurity" -}}
runAsUser: {{ .Values.user }}
runAsGroup: {{ .Values.user }}
fsGroup: {{ .Values.user }}
fsGroupChangePolicy: OnRootMismatch   # a disk's folder stays the node's alone
runAsNonRoot: true
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "pdx.security" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
{{- end -}}

{{- /* A folder of an emptyDir is open to the pod's group, so the node makes one for itself in it. */ -}}
{{- define "pdx.podIdentity" -}}
- {name: PDX_NODE, value: "ipc:///run/pdx/node/node.sock"}
- {name: TMPDIR, value: /run/pdx}
- {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
- {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
{{- end -}}

{{- /* Whether nodes have a disk. */ -}}
{{- define "pdx.disk" -}}
{{- $there := ternary .Values.disk.size .Values.disk.hostPath (eq .Values.shape "host") -}}
{{- if $there }}{{ fail (printf "disk: `size` is for shape pod, `hostPath` for shape host, which is %s" .Values.shape) }}{{ end -}}
{{ ternary .Values.disk.hostPath .Values.disk.size (eq .Values.shape "host") }}
{{- end -}}

{{- define "pdx.nodeContainer" -}}
{{- $name := ternary "$(HOST_NAME)" "$(POD_NAME)" (eq .Values.shape "host") -}}
{{- $ip := include "pdx.ip" (dict "root" . "ip" (ternary "$(HOST_IP)" "$(POD_IP)" (eq .Values.shape "host"))) -}}
name: node
image: {{ .Values.images.node }}
imagePullPolicy: {{ .Values.images.pullPolicy }}
args:
  - node
  - --name={{ $name }}
  - --listen=tcp://{{ $ip }}:7700
  - --keys=/etc/pdx/key/key_secret
  - --roster=/etc/pdx/roster/roster.toml
{{- if .Values.discover }}
  - --discover=kubernetes:{{ include "pdx.name" . }}-peers
{{- else }}
  - --proxy={{ include "pdx.proxies" . }}
{{- end }}
  - --arena={{ .Values.arenaGiB }}GiB
  - --metrics={{ $ip }}:9100
{{- if include "pdx.disk" . }}
  - --disk=/var/lib/pdx/chunks
{{- with .Values.disk.limit }}
  - --disk-limit={{ . }}
{{- end }}
{{- end }}
{{- with .Values.nodeArgs }}
{{ toYaml . | indent 2 }}
{{- end }}
env:
{{ include "pdx.podIdentity" . | indent 2 }}
  - {name: HOST_NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
  - {name: HOST_IP, valueFrom: {fieldRef: {fieldPath: status.hostIP}}}
ports:
  - {name: node, containerPort: 7700}
  - {name: metrics, containerPort: 9100}
readinessProbe:
  exec: {command: [pdx, node, --status]}
  periodSeconds: 10
  timeoutSeconds: 5
livenessProbe:
  exec: {command: [pdx, node, --status]}
  initialDelaySeconds: 60
  periodSeconds: 30
  timeoutSeconds: 20
  failureThreshold: 4
resources:
{{- $resources := deepCopy .Values.nodeResources }}
{{- $memory := printf "%dGi" (add 2 (int .Values.arenaGiB)) }}
{{ toYaml (merge $resources (dict "requests" (dict "memory" $memory) "limits" (dict "memory" $memory))) | indent 2 }}
securityContext:
  readOnlyRootFilesystem: true
{{ include "pdx.security" . | indent 2 }}
volumeMounts:
  - {name: run, mountPath: /run/pdx}
  - {name: shm, mountPath: /dev/shm}
  - {name: roster, mountPath: /etc/pdx/roster, readOnly: true}
  - name: keys
    mountPath: /etc/pdx/key/key_secret
    subPathExpr: {{ $name }}.key_secret
    readOnly: true
{{- if include "pdx.disk" . }}
  - {name: chunks, mountPath: /var/lib/pdx}
{{- end }}
{{- include "pdx.apiMount" . | nindent 2 }}
{{- end -}}

{{- /* Of the containers that discover, and no others of their pods. */ -}}
{{- define "pdx.apiMount" -}}
{{- if .Values.discover -}}
- {name: api, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
{{- end -}}
{{- end -}}

{{- define "pdx.apiVolume" -}}
{{- if .Values.discover -}}
- name: api
  projected:
    sources:
      - serviceAccountToken: {path: token, expirationSeconds: 3600}
      - configMap: {name: kube-root-ca.crt, items: [{key: ca.crt, path: ca.crt}]}
      - downwardAPI: {items: [{path: namespace, fieldRef: {fieldPath: metadata.namespace}}]}
{{- end -}}
{{- end -}}

{{- /* Seconds for requests in progress when a pod ends; 5 go before, to be known as ending, and 10 after. */ -}}
{{- define "pdx.drain" -}}{{ max 1 (sub .Values.terminationGraceSeconds 15) }}{{- end -}}

{{- /* Of (dict "root" $ "part" "prefill" "engine" {…}), as are the next two. */ -}}
{{- define "pdx.engineUrl" -}}
{{- $host := printf "$(POD_NAME).%s-%s.%s.svc" (include "pdx.name" .root) .part .root.Release.Namespace -}}
{{- if or .root.Values.discover (eq .root.Values.shape "host") -}}
{{- $host = include "pdx.ip" (dict "root" .root "ip" (ternary "$(HOST_IP)" "$(POD_IP)" (eq .root.Values.shape "host"))) -}}
{{- end -}}
http://{{ $host }}:{{ .engine.port }}
{{- end -}}

{{- /* Of an engine, and of the node in its pod, which moves its KV until then. Only a shell has variables here. vLLM's
--shutdown-timeout would not do: with it, vLLM takes requests that still come, and answers them without text. */ -}}
{{- define "pdx.engineDrains" -}}
{{- $url := include "pdx.engineUrl" . | replace "$(" "${" | replace ")" "}" -}}
lifecycle:
  preStop:
    exec: {command: [sh, -c, 'timeout {{ include "pdx.drain" .root }} pdx cache drain "{{ $url }}" --wait']}
{{- end -}}

{{- define "pdx.engineContainer" -}}
name: engine
image: {{ .root.Values.images.engine }}
imagePullPolicy: {{ .root.Values.images.pullPolicy }}
args:
  - {{ .engine.role }}
  - {{ required "model: which one?" .root.Values.model }}
  - --no-start-node
  - --url={{ include "pdx.engineUrl" . }}
  - {{ ternary "--host=::" "--host=0.0.0.0" .root.Values.ipv6 | quote }}
  - --port={{ .engine.port }}
{{- with .engine.flags }}
{{ toYaml . | indent 2 }}
{{- end }}
env:
{{ include "pdx.podIdentity" .root | indent 2 }}
  - {name: HOST_IP, valueFrom: {fieldRef: {fieldPath: status.hostIP}}}
{{- with .root.Values.engineEnvFrom }}
envFrom:
{{ toYaml . | indent 2 }}
{{- end }}
ports:
  - {name: http, containerPort: {{ .engine.port }}}
{{ include "pdx.engineDrains" . }}
startupProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 10
  failureThreshold: 180
readinessProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 10
resources:
{{- $resources := deepCopy .engine.resources }}
{{- $gpus := ternary (dict "limits" (dict "nvidia.com/gpu" .engine.gpus)) (dict) (gt (int .engine.gpus) 0) }}
{{ toYaml (merge $resources $gpus) | indent 2 }}
securityContext:
{{ include "pdx.security" .root | indent 2 }}
volumeMounts:
  - {name: run, mountPath: /run/pdx}
  - {name: shm, mountPath: /dev/shm}
{{- if .root.Values.modelCache }}
  - {name: models, mountPath: /models}
{{- end }}
{{- end -}}

{{- define "pdx.nodeVolumes" -}}
{{- if eq .Values.shape "host" }}
- {name: run, hostPath: {path: /run/pdx, type: DirectoryOrCreate}}
- {name: shm, hostPath: {path: /dev/shm, type: Directory}}
{{- with .Values.disk.hostPath }}
- {name: chunks, hostPath: {path: {{ . }}, type: DirectoryOrCreate}}
{{- end }}
{{- else }}
- {name: run, emptyDir: {medium: Memory, sizeLimit: 16Mi}}
- {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ add 1 (int .Values.arenaGiB) }}Gi}}
{{- end }}
- {name: roster, configMap: {name: {{ include "pdx.name" . }}-roster}}
- {name: keys, secret: {secretName: {{ .Values.keysSecret }}, defaultMode: 0440}}
{{ include "pdx.apiVolume" . }}
{{- end -}}
