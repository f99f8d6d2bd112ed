{{- define "headrace.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "headrace.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: server
{{- end -}}

{{- define "headrace.routerSelector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: router
{{- end -}}

{{- define "headrace.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "headrace.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "headrace.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* The server's container. Its argument is a dict: root, and nodeRank ("" on one node). */}}
{{- define "headrace.container" -}}
{{- $v := .root.Values -}}
name: server
image: {{ printf "%s:%s" $v.image.repository (default .root.Chart.AppVersion $v.image.tag) | quote }}
imagePullPolicy: {{ $v.image.pullPolicy }}
args:
  - --model-path={{ $v.model.path }}
  - --port={{ $v.port }}
  - --drain-timeout={{ $v.drainSeconds }}
  - --enable-metrics
  {{- if $v.keys.open }}
  - --allow-open-admin
  {{- end }}
  {{- if .nodeRank }}
  - --nnodes={{ $v.nodes }}
  - --node-rank={{ .nodeRank }}
  - --dist-init-addr=$(LWS_LEADER_ADDRESS):{{ $v.distPort }}
  {{- end }}
  {{- range $v.model.args }}
  - {{ . | quote }}
  {{- end }}
env:
  # The server listens on the pod's address; what lies beside it is on private sockets in /tmp.
  - name: HOME
    value: /home/headrace
  # Triton's own choice, ~/.triton, lies on the read-only root.
  - name: TRITON_CACHE_DIR
    value: /home/headrace/.cache/triton
  {{- if $v.keys.existingSecret }}
  - name: HEADRACE_API_KEY_FILE
    value: /run/secrets/headrace/api-key
  - name: HEADRACE_ADMIN_API_KEY_FILE
    value: /run/secrets/headrace/admin-api-key
  {{- if .nodeRank }}
  - name: HEADRACE_DIST_KEY_FILE
    value: /run/secrets/headrace/dist-key
  {{- end }}
  {{- end }}
  {{- with $v.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
ports:
  - name: http
    containerPort: {{ $v.port }}
  {{- if .nodeRank }}
  - name: dist
    containerPort: {{ $v.distPort }}
  {{- end }}
{{- if ne .nodeRank "$(LWS_WORKER_INDEX)" }}
startupProbe:
  httpGet: {path: /startupz, port: http}
  periodSeconds: 5
  timeoutSeconds: 4
  failureThreshold: {{ mul $v.startupMinutes 12 }}
livenessProbe:
  httpGet: {path: /livez, port: http}
  periodSeconds: 10
  timeoutSeconds: 8
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: http}
  periodSeconds: 5
  timeoutSeconds: 4
  failureThreshold: 2
{{- end }}
lifecycle:
  preStop:
    # Routers and services forget the pod first; then SIGTERM drains what runs. A node above 0 ends at
    # SIGTERM, so it waits until node 0 has drained.
    sleep: {seconds: {{ if eq .nodeRank "$(LWS_WORKER_INDEX)" }}{{ add $v.drainSeconds 8 }}{{ else }}5{{ end }}}
resources:
  requests:
    {{- toYaml $v.resources.requests | nindent 4 }}
  limits:
    {{- toYaml $v.resources.limits | nindent 4 }}
    {{- if $v.gpus }}
    nvidia.com/gpu: {{ $v.gpus }}
    {{- end }}
securityContext:
  {{- include "headrace.containerSecurity" .root | nindent 2 }}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  - {name: cache, mountPath: /home/headrace/.cache}
  - {name: shm, mountPath: /dev/shm}
  {{- if $v.model.volume }}
  - {name: model, mountPath: /mnt/models, readOnly: true}
  {{- end }}
  {{- if $v.keys.existingSecret }}
  - {name: keys, mountPath: /run/secrets/headrace, readOnly: true}
  {{- end }}
{{- end -}}

{{/* The pod's specification. Its argument is that of headrace.container. */}}
{{- define "headrace.pod" -}}
{{- $v := .root.Values -}}
{{- if and (not $v.keys.existingSecret) (not $v.keys.open) -}}
{{- fail "Set keys.existingSecret to a Secret with the entries api-key and admin-api-key, or keys.open=true on a network that only trusted clients reach." -}}
{{- end -}}
serviceAccountName: {{ include "headrace.name" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ add $v.drainSeconds 15 }}
securityContext:
  {{- include "headrace.podSecurity" .root | nindent 2 }}
{{- with $v.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $v.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $v.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
containers:
  - {{- include "headrace.container" . | nindent 4 }}
volumes:
  - name: tmp
    emptyDir: {}
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: {{ $v.sharedMemory }}}
  - name: cache
    {{- if $v.cache.existingClaim }}
    persistentVolumeClaim: {claimName: {{ $v.cache.existingClaim }}}
    {{- else }}
    emptyDir: {}
    {{- end }}
  {{- with $v.model.volume }}
  - name: model
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $v.keys.existingSecret }}
  - name: keys
    secret: {secretName: {{ . }}, defaultMode: 0440}
  {{- end }}
{{- end -}}

{{/* Labels and annotations of a pod. Its argument is a dict: root. */}}
{{- define "headrace.podMetadata" -}}
labels:
  {{- include "headrace.selector" .root | nindent 2 }}
  {{- include "headrace.labels" .root | nindent 2 }}
  {{- with .root.Values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .root.Values.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
