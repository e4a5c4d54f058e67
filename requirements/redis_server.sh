#!/usr/bin/env bash
# Install redis-server, which tests start for themselves, where that is possible: by root on Debian and its kin. It never
# fails, takes two minutes at most, and starts no service. WITHOUT_REDIS=1 leaves everything as it is.
set -u
command -v redis-server >/dev/null && exit 0
if [ -n "${WITHOUT_REDIS:-}" ] || [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
	exit 0
fi
# RUNLEVEL=1: invoke-rc.d starts nothing in single-user mode.
install() {
	RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive timeout 60 \
		apt-get install --yes --no-install-recommends -o DPkg::Lock::Timeout=20 redis-server >/dev/null 2>&1 </dev/null
}
echo "installing redis-server, for the tests of sinks in Redis"
install || { timeout 40 apt-get update >/dev/null 2>&1 </dev/null && install; } ||
	echo "redis-server cannot be installed; the tests that need it will be skipped"
exit 0
