#!/usr/bin/env bash
# Compares the images of other projects that the files of this folder pin by digest with what their tags name now, and
# exits with 1 if one has changed: docker/renew.sh [--write]
# With --write it writes the new digests into the files instead; build and test the images before you commit them.
# It needs docker with buildx, and the registries. .github/workflows/renew.yml runs it once a week.
set -euo pipefail
cd "$(dirname "$0")"

case ${1:-} in
"" | --write) write=${1:-} ;;
*) echo "renew.sh: expected no argument, or --write" >&2 && exit 2 ;;
esac
files=(Dockerfile.* compose*.yaml)
num_changed=0
for image in $(grep -hoE '[a-z0-9][a-z0-9./_-]*:[A-Za-z0-9._-]+@sha256:[0-9a-f]{64}' "${files[@]}" | sort -u); do
	name=${image%@*}
	digest=$(docker buildx imagetools inspect "$name" --format '{{.Manifest.Digest}}')
	if ! [[ $digest =~ ^sha256:[0-9a-f]{64}$ ]]; then
		echo "renew.sh: the registry has no digest for $name, but ${digest:-nothing}; try again later" >&2 && exit 2
	fi
	if [ "$image" = "$name@$digest" ]; then
		echo "$name is pinned as its registry has it"
	elif [ -n "$write" ]; then
		sed -i "s|$image|$name@$digest|g" "${files[@]}"
		echo "$name is now pinned to $digest"
	else
		echo "$name has changed to $digest; write it into the files with docker/renew.sh --write"
		num_changed=$((num_changed + 1))
	fi
done
exit $((num_changed > 0))
