#!/usr/bin/env bash
# Debian packages that the tests and the compose test need and that a bare machine may lack.
set -euo pipefail

packages=()
command -v make >/dev/null || packages+=(make)
command -v g++ >/dev/null || packages+=(g++)
python3 -c 'import venv, ensurepip' 2>/dev/null || packages+=(python3-venv)
command -v dockerd >/dev/null || packages+=(docker.io iptables)
command -v docker-compose >/dev/null || packages+=(docker-compose)
command -v debootstrap >/dev/null || packages+=(debootstrap)
# What the Mooncake transfer engine is linked to.
for library in libibverbs.so.1:libibverbs1 libnuma.so.1:libnuma1 libcurl.so.4:libcurl4; do
  ldconfig -p | grep -q "${library%%:*} " || packages+=("${library#*:}")
done
[ ${#packages[@]} -eq 0 ] && exit 0
echo "installing: ${packages[*]}"
if ! { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    "${packages[@]}"; } >/tmp/epd-apt.log 2>&1; then
  tail -n 20 /tmp/epd-apt.log
  echo "system packages could not be installed; the steps that need them will say so"
fi
