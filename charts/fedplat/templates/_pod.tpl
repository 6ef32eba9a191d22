{{- /* Environment, mounts and security of every container of the pod, also for commands that `kubectl exec` runs.
Secrets are files, so that child processes (evaluators, the dashboard) do not inherit them; the library of the object
store reads its keys from variables only. */ -}}
{{- define "fedplat.environment" -}}
- name: FEDPLAT_DATA_DIR
  value: /var/lib/fedplat/data
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
{{- if eq .Values.database.type "postgresql" }}
- name: FEDPLAT_DATABASE
  value: "@/etc/fedplat/database/url"
- name: FEDPLAT_ADVERTISE
  value: "$(POD_NAME).{{ include "fedplat.daemonDomain" . }}:7443"
{{- end }}
{{- if not .Values.pki.existingSecret }}
- name: FEDPLAT_PROFILE
  value: /var/lib/fedplat/data/admin.toml
{{- end }}
{{- if eq .Values.storage.type "object" }}
{{- with .Values.storage.object }}
- name: FEDPLAT_BLOBS
  value: {{ .blobs | quote }}
- name: FEDPLAT_SPOOL
  value: {{ .spool | quote }}
{{- if .existingSecret }}
- name: AWS_ACCESS_KEY_ID
  valueFrom:
    secretKeyRef:
      name: {{ .existingSecret }}
      key: AWS_ACCESS_KEY_ID
- name: AWS_SECRET_ACCESS_KEY
  valueFrom:
    secretKeyRef:
      name: {{ .existingSecret }}
      key: AWS_SECRET_ACCESS_KEY
{{- end }}
{{- if .endpoint }}
- name: AWS_ENDPOINT_URL
  value: {{ .endpoint | quote }}
{{- end }}
{{- if .region }}
- name: AWS_REGION
  value: {{ .region | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "fedplat.container" -}}
image: {{ include "fedplat.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  {{- include "fedplat.securityContext" . | nindent 2 }}
env:
  {{- include "fedplat.environment" . | nindent 2 }}
{{- with .Values.extraEnvFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
resources:
  {{- toYaml .Values.resources | nindent 2 }}
volumeMounts:
  - name: data
    mountPath: /var/lib/fedplat
  - name: tmp
    mountPath: /tmp
  {{- if .Values.database.existingSecret }}
  - name: database
    mountPath: /etc/fedplat/database
    readOnly: true
  {{- end }}
  {{- if .Values.pki.existingSecret }}
  - name: pki
    mountPath: /etc/fedplat/pki
    readOnly: true
  {{- end }}
  {{- with .Values.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- define "fedplat.volumes" -}}
- name: data
  {{- if include "fedplat.hasClaim" . }}
  persistentVolumeClaim:
    claimName: {{ include "fedplat.claim" . }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ .Values.storage.scratchSize }}
  {{- end }}
- name: tmp
  emptyDir:
    sizeLimit: {{ .Values.tmpSize }}
{{- if .Values.database.existingSecret }}
- name: database
  secret:
    secretName: {{ .Values.database.existingSecret }}
    defaultMode: 0440
    items:
      - key: {{ .Values.database.secretKey }}
        path: url
{{- end }}
{{- if .Values.pki.existingSecret }}
- name: pki
  secret:
    secretName: {{ .Values.pki.existingSecret }}
    defaultMode: 0440
    items:
      {{- with .Values.pki.keys }}
      - key: {{ .ca }}
        path: ca.pem
      - key: {{ .certificate }}
        path: server.pem
      - key: {{ .key }}
        path: server.key
      {{- if $.Values.mtls.enabled }}
      - key: {{ .caKey }}
        path: ca.key
      {{- end }}
      {{- end }}
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* The daemon reads DATA_DIR/pki. Links to the Secret's files let it load renewed ones without a restart. Each link
is made under another name and renamed, since pods with a shared volume do this at the same time. */ -}}
{{- define "fedplat.linkCertificates" -}}
set -eu
umask 077
mkdir -p "$FEDPLAT_DATA_DIR/pki"
cd "$FEDPLAT_DATA_DIR/pki"
for source in /etc/fedplat/pki/*; do
  name="${source##*/}"
  if [ -e "$name" ] && [ ! -L "$name" ]; then
    echo "$PWD/$name is not a link to the Secret: the volume has an authority of its own." >&2
    echo "Save and remove $PWD, or unset pki.existingSecret." >&2
    exit 1
  fi
  ln -sfn "$source" ".$name.$POD_NAME"
  mv -fT ".$name.$POD_NAME" "$name"
done
{{- end -}}

{{- define "fedplat.initContainers" -}}
{{- if .Values.pki.existingSecret }}
- name: certificates
  command: ["/bin/sh", "-c"]
  args:
    - |
      {{- include "fedplat.linkCertificates" . | nindent 6 }}
  {{- include "fedplat.container" . | nindent 2 }}
- name: database
  command: ["fedplat-server", "db", "upgrade"]
  {{- include "fedplat.container" . | nindent 2 }}
{{- else }}
- name: init
  command: ["fedplat-server", "init"]
  args:
    {{- range include "fedplat.hosts" . | fromJsonArray }}
    - {{ printf "--host=%s" . | quote }}
    {{- end }}
    - "--port={{ .Values.service.port }}"
  {{- include "fedplat.container" . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "fedplat.arguments" -}}
{{- $listen := .Values.listenHost -}}
- "--listen={{ $listen }}:7443"
- "--health={{ $listen }}:7445"
{{- if .Values.mtls.enabled }}
- "--mtls-listen={{ $listen }}:7444"
{{- end }}
{{- if .Values.metrics.enabled }}
- "--metrics={{ $listen }}:9464"
{{- range .Values.metrics.jobMetrics }}
- {{ printf "--job-metric=%s" . | quote }}
{{- end }}
{{- end }}
{{- if .Values.dashboard.enabled }}
- "--dashboard={{ $listen }}:7480"
{{- end }}
{{- if .Values.traces.endpoint }}
- {{ printf "--traces=%s" .Values.traces.endpoint | quote }}
{{- end }}
{{- if eq .Values.database.type "postgresql" }}
- "--lease={{ .Values.leaseSeconds }}"
{{- end }}
- "--grace={{ .Values.graceSeconds }}"
- "--upload-memory-mib={{ .Values.uploadMemoryMiB | int }}"
- "--log-level={{ .Values.logLevel }}"
{{- range .Values.trustedProxies }}
- {{ printf "--trusted-proxy=%s" . | quote }}
{{- end }}
{{- range .Values.webhookNetworks }}
- {{ printf "--webhook-network=%s" . | quote }}
{{- end }}
{{- range .Values.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end -}}
