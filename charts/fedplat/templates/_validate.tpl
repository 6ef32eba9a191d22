{{- /* Rules between values, which a schema cannot explain. */ -}}
{{- define "fedplat.validate" -}}
{{- $values := .Values -}}
{{- $database := $values.database -}}
{{- $storage := $values.storage -}}
{{- $claim := include "fedplat.hasClaim" . -}}
{{- $errors := list -}}
{{- if and (gt (int $values.replicas) 1) (eq $database.type "sqlite") -}}
{{- $errors = append $errors (printf "replicas is %d, but SQLite serves one daemon: set replicas to 1, or database.type to postgresql" (int $values.replicas)) -}}
{{- end -}}
{{- if and (gt (int $values.replicas) 1) (eq $storage.type "volume") -}}
{{- $errors = append $errors (printf "replicas is %d, but storage.type volume serves one pod: set storage.type to shared (a ReadWriteMany volume) or object (S3)" (int $values.replicas)) -}}
{{- end -}}
{{- if and (gt (int $values.replicas) 1) (not $values.pki.existingSecret) -}}
{{- $errors = append $errors "several daemons share one certificate authority: make a Secret with it (docs/kubernetes.md, \"Certificates\") and name it in pki.existingSecret" -}}
{{- end -}}
{{- if and (eq $database.type "postgresql") (not $database.existingSecret) -}}
{{- $errors = append $errors "database.type postgresql needs database.existingSecret, a Secret with the URL of the database" -}}
{{- end -}}
{{- if and (eq $database.type "sqlite") $database.existingSecret -}}
{{- $errors = append $errors "database.existingSecret is only for database.type postgresql: set the type, or remove the Secret" -}}
{{- end -}}
{{- if and (eq $database.type "sqlite") (eq $storage.type "shared") -}}
{{- $errors = append $errors "SQLite is not safe on a network file system: set storage.type to volume, or database.type to postgresql" -}}
{{- end -}}
{{- if eq $storage.type "object" -}}
{{- if not (and $storage.object.blobs $storage.object.spool) -}}
{{- $errors = append $errors "storage.type object needs storage.object.blobs and storage.object.spool, such as s3://bucket/blobs and s3://bucket/spool" -}}
{{- end -}}
{{- else if or $storage.object.blobs $storage.object.spool -}}
{{- $errors = append $errors "storage.object.blobs and storage.object.spool are only for storage.type object: set the type, or remove them" -}}
{{- end -}}
{{- if and (not $claim) (not $values.pki.existingSecret) -}}
{{- $errors = append $errors "without a volume each start would make another certificate authority: make a Secret with one (docs/kubernetes.md, \"Certificates\") and name it in pki.existingSecret" -}}
{{- end -}}
{{- if and $values.mtls.enabled (eq $values.service.type "NodePort") -}}
{{- $errors = append $errors "mtls.enabled does not work with service.type NodePort, because the server tells clients its own port, 7444: use LoadBalancer or ClusterIP" -}}
{{- end -}}
{{- if and $values.service.nodePort (eq $values.service.type "ClusterIP") -}}
{{- $errors = append $errors "service.nodePort is only for service.type NodePort or LoadBalancer" -}}
{{- end -}}
{{- range $kind := list "ingress" "gateway" -}}
{{- $route := index $values.dashboard $kind -}}
{{- if and $route.enabled (not $values.dashboard.enabled) -}}
{{- $errors = append $errors (printf "dashboard.%s.enabled needs dashboard.enabled" $kind) -}}
{{- end -}}
{{- if and $route.enabled (not $route.host) -}}
{{- $errors = append $errors (printf "dashboard.%s.host is missing: the name of the site, which is in the server's certificate" $kind) -}}
{{- end -}}
{{- end -}}
{{- if and $values.dashboard.gateway.enabled (not (and $values.dashboard.gateway.name $values.dashboard.gateway.caConfigMap)) -}}
{{- $errors = append $errors "dashboard.gateway needs name (of the Gateway) and caConfigMap (with the server's authorities as ca.crt)" -}}
{{- end -}}
{{- if not $values.metrics.enabled -}}
{{- range $kind := list "serviceMonitor" "prometheusRule" -}}
{{- if (index $values.metrics $kind).enabled -}}
{{- $errors = append $errors (printf "metrics.%s.enabled needs metrics.enabled" $kind) -}}
{{- end -}}
{{- end -}}
{{- if $values.metrics.jobMetrics -}}
{{- $errors = append $errors "metrics.jobMetrics needs metrics.enabled" -}}
{{- end -}}
{{- end -}}
{{- range $values.hosts -}}
{{- if not (regexMatch `^([A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9])?|[0-9A-Fa-f.]*:[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*)$` .) -}}
{{- $errors = append $errors (printf "hosts: %q is not a name or an address without a port, such as fed.example.org" .) -}}
{{- end -}}
{{- end -}}
{{- $least := add (mul 2 (int $values.graceSeconds)) 5 | int -}}
{{- if lt (int $values.terminationGracePeriodSeconds) $least -}}
{{- $errors = append $errors (printf "terminationGracePeriodSeconds is %d, but graceSeconds %d needs at least %d: a daemon that is killed delays the takeover" (int $values.terminationGracePeriodSeconds) (int $values.graceSeconds) $least) -}}
{{- end -}}
{{- if $errors -}}
{{- fail (printf "\n\n- %s\n" (join "\n- " $errors)) -}}
{{- end -}}
{{- end -}}
