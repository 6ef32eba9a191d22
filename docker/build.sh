#!/usr/bin/env bash
# Builds images of this repository, one after the other:
#   docker/build.sh [TARGET ...] [-- OPTION ...]
# Without targets: all but those for NVIDIA GPUs, which are gigabytes, and those of Dockerfile.services. Options go to the
# engine's `build`, for instance `-- --platform linux/arm64` or `-- --build-arg PYTHON=registry.example/python:3.11-slim`.
#   ENGINE     docker or podman (default: docker if its engine answers, else podman)
#   REGISTRY   prefix of the images' names, such as registry.example/team/
#   VERSION    tag and label (default: that of pyproject.toml)
#   SOURCE     address of the source code, for the label
set -euo pipefail
cd "$(dirname "$0")/.."

all=(server digits-server flower-server pool-server client digits-client flower-client gpu-client
	database-services s3-services prometheus-services)
targets=()
while (($#)) && [ "$1" != -- ]; do
	case " ${all[*]} " in
	*" $1 "*) targets+=("$1") ;;
	*) echo "build.sh: no target $1; expected some of: ${all[*]}" >&2 && exit 2 ;;
	esac
	shift
done
shift $(($# > 0))
((${#targets[@]})) || targets=(server digits-server flower-server client digits-client flower-client)

engine=${ENGINE:-$(docker info >/dev/null 2>&1 && echo docker || echo podman)}
command -v "$engine" >/dev/null || { echo "build.sh: no engine; start docker, or install podman" >&2 && exit 1; }
build=("$engine" build)
if [ "$engine" = podman ]; then
	build+=(--format docker) # images in OCI's own format have no health check
elif "$engine" buildx version >/dev/null 2>&1; then
	build=("$engine" buildx build --load)
fi
version=${VERSION:-$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml | head -n 1)}
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)

for target in "${targets[@]}"; do
	image=${REGISTRY:-}fedplat-$target:$version
	"${build[@]}" -f "docker/Dockerfile.${target##*-}" --target "$target" -t "$image" \
		--build-arg VERSION="$version" --build-arg REVISION="$revision" --build-arg SOURCE="${SOURCE:-unknown}" "$@" .
	echo "built $image"
done
