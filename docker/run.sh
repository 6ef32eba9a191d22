#!/usr/bin/env bash
# Runs a compose file of this folder to the end of its job, with images that docker/build.sh has built, and removes what
# it started: docker/run.sh compose.yaml|compose.scale.yaml|compose.flower.yaml
# The exit status is that of the service `submit`: 0 if the job is COMPLETED. With KEEP=1 everything keeps running.
#   COMPOSE   the command (default: `docker compose` if its engine answers, else podman-compose)
#   ENGINE    docker or podman
set -euo pipefail
cd "$(dirname "$0")"

file=${1:-}
[ -f "$file" ] || { echo "run.sh: expected one of: $(echo compose*.yaml)" >&2 && exit 2; }
engine=${ENGINE:-$(docker info >/dev/null 2>&1 && echo docker || echo podman)}
compose=${COMPOSE:-$([ "$engine" = docker ] && echo docker compose || echo podman-compose)}
separator=$([ "$engine" = docker ] && echo - || echo _)
submit=$(sed -n 's/^name: //p' "$file")${separator}submit${separator}1

finish() {
	[ -n "${KEEP:-}" ] || $compose -f "$file" down -v >/dev/null 2>&1
}
trap finish EXIT
if [ "$engine" = docker ]; then
	$compose -f "$file" up --no-build -d
else
	# podman cannot start what depends on several services that have ended: start in the order of the file instead.
	for service in $(sed -n '/^services:/,/^\(networks\|volumes\):/s/^  \([a-z0-9-]*\):$/\1/p' "$file"); do
		$compose -f "$file" up --no-build --no-deps -d "$service"
		case $service in secrets | init | ticket) "$engine" wait "${submit/submit/$service}" ;; esac
	done
fi
"$engine" logs -f "$submit" || true
status=$("$engine" wait "$submit")
echo "run.sh: $file: submit has exited with status $status"
exit "$status"
