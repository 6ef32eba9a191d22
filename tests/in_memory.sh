#!/usr/bin/env bash
# Runs a command whose temporary files are in memory, if there is room for them: daemons sync what they write, and on a
# disk that other programs use, the tests would wait for it most of the time.
set -u
free_kib=$(df --output=avail /dev/shm 2>/dev/null | tail -n 1)
if [ -w /dev/shm ] && [ "${free_kib:-0}" -gt $((4 * 1024 * 1024)) ]; then
	TMPDIR=$(mktemp -d /dev/shm/fedplat-XXXXXX)
	export TMPDIR
	trap 'rm -rf "$TMPDIR"' EXIT
fi
"$@"
