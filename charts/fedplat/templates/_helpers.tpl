{{- define "fedplat.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "fedplat.selectorLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "fedplat.labels" -}}
{{ include "fedplat.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "fedplat.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{- define "fedplat.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (ternary (include "fedplat.fullname" .) "default" .Values.serviceAccount.create) -}}
{{- end -}}

{{- /* "true" if the data folder is on a claim; else it is on the pod's own disk */ -}}
{{- define "fedplat.hasClaim" -}}
{{- if or (eq .Values.database.type "sqlite") (ne .Values.storage.type "object") -}}true{{- end -}}
{{- end -}}

{{- define "fedplat.claim" -}}
{{- .Values.storage.existingClaim | default (printf "%s-data" (include "fedplat.fullname" .)) -}}
{{- end -}}

{{- /* The name of a daemon, after its pod's name */ -}}
{{- define "fedplat.daemonDomain" -}}
{{- printf "%s-daemons.%s.svc.%s" (include "fedplat.fullname" .) .Release.Namespace .Values.clusterDomain -}}
{{- end -}}

{{- /* All names of the server's certificate, as a JSON list. The first is the address in the operator's profile. */ -}}
{{- define "fedplat.hosts" -}}
{{- $name := include "fedplat.fullname" . -}}
{{- $service := printf "%s.%s.svc" $name .Release.Namespace -}}
{{- $hosts := .Values.hosts -}}
{{- $hosts = concat $hosts (list (printf "%s.%s" $service .Values.clusterDomain) $service) -}}
{{- with .Values.dashboard.ingress }}{{ if .enabled }}{{ $hosts = append $hosts .host }}{{ end }}{{ end -}}
{{- with .Values.dashboard.gateway }}{{ if .enabled }}{{ $hosts = append $hosts .host }}{{ end }}{{ end -}}
{{- if eq .Values.database.type "postgresql" -}}
{{- range $index := until (int .Values.replicas) -}}
{{- $hosts = append $hosts (printf "%s-%d.%s" $name $index (include "fedplat.daemonDomain" $)) -}}
{{- end -}}
{{- end -}}
{{- $hosts | uniq | toJson -}}
{{- end -}}

{{- define "fedplat.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- /* The ports of the container and of Services: name, number */ -}}
{{- define "fedplat.ports" -}}
{{- $ports := list (dict "name" "grpc" "port" 7443) -}}
{{- if .Values.mtls.enabled }}{{ $ports = append $ports (dict "name" "grpc-mtls" "port" 7444) }}{{ end -}}
{{- if .Values.metrics.enabled }}{{ $ports = append $ports (dict "name" "metrics" "port" 9464) }}{{ end -}}
{{- if .Values.dashboard.enabled }}{{ $ports = append $ports (dict "name" "dashboard" "port" 7480) }}{{ end -}}
{{- $ports | toJson -}}
{{- end -}}
