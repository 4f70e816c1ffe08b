#!/usr/bin/env bash
# Builds the images on a base image made here, runs the compose file for real and compares its
# answer with the one of a local fleet. Skipped, with the reason, where no engine can be started.
set -euo pipefail
cd "$(dirname "$0")/.."

base_image=epd-ci-base
work=$(mktemp -d)
dockerd_pid=""
export COMPOSE_PROJECT_NAME=epdci BASE_IMAGE=$base_image
export EPD_ROUTER_PORT=${EPD_ROUTER_PORT:-55050} EPD_ROUTER_HTTP_PORT=${EPD_ROUTER_HTTP_PORT:-58000}
# One file format, two clients: the Debian package brings docker-compose 1.29.
compose=(docker-compose)
docker compose version >/dev/null 2>&1 && compose=(docker compose)

finish() {
  status=$?
  "${compose[@]}" --profile client down --volumes --timeout 20 >/dev/null 2>&1 || true
  if [ -n "$dockerd_pid" ]; then
    kill "$dockerd_pid" 2>/dev/null || true
    wait "$dockerd_pid" 2>/dev/null || true
  fi
  rm -rf "$work"
  exit $status
}
trap finish EXIT

skip() {
  echo "compose test SKIPPED: $1"
  exit 0
}

start_engine() {
  docker info >/dev/null 2>&1 && return 0
  command -v dockerd >/dev/null || return 1
  dockerd >"$work/dockerd.log" 2>&1 &
  dockerd_pid=$!
  for _ in $(seq 60); do
    docker info >/dev/null 2>&1 && return 0
    kill -0 "$dockerd_pid" 2>/dev/null || break
    sleep 0.5
  done
  tail -n 5 "$work/dockerd.log"
  return 1
}

# A Debian base with this machine's way to the package registries: its CA bundle, its pip settings
# and the folders they point to.
make_base_image() {
  docker image inspect "$base_image" >/dev/null 2>&1 && return 0
  local root=$work/root
  debootstrap --variant=minbase --include=python3,python3-venv,python3-pip,ca-certificates \
    "$(. /etc/os-release && echo "$VERSION_CODENAME")" "$root" >"$work/debootstrap.log" 2>&1 \
    || { tail -n 5 "$work/debootstrap.log"; return 1; }
  python3 - "$root" <<'PY'
import ast, pathlib, shutil, subprocess, sys

root = pathlib.Path(sys.argv[1])
lines = subprocess.run(["pip", "config", "list"], capture_output=True, text=True).stdout.splitlines()
settings = {}
for line in lines:
    name, _, value = line.partition("=")
    settings[name.split(".")[-1]] = ast.literal_eval(value)
kept = []
for name, value in settings.items():
    paths = []
    for word in value.split():
        path = pathlib.Path(word.removeprefix("file://"))
        if path.is_absolute():
            if path.name == "simple":  # an index of release files that the project does not need
                continue
            target = root / path.relative_to("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                shutil.copytree(path, target, dirs_exist_ok=True)
            elif path.is_file():
                shutil.copy(path.resolve(), target)
            else:
                continue
        paths.append(word)
    if paths:
        kept.append(f"{name} = {' '.join(paths)}")
(root / "etc/pip.conf").write_text("[global]\n" + "\n".join(kept) + "\n")
PY
  tar -C "$root" -c . | docker import - "$base_image" >/dev/null
}

# Version 2 of compose brings scaled services back to one when a run starts what it depends on.
client() {
  "${compose[@]}" --profile client run --rm --no-deps -T client "$@"
}

ask() {
  client 2>"$work/client.err" | tr -d '\r' \
    || { cat "$work/client.err"; return 1; }
}

start_engine || skip "no Docker engine can be started here"
command -v debootstrap >/dev/null || skip "debootstrap is not installed"
make_base_image || skip "no base image could be made"

export DOCKER_BUILDKIT=0 COMPOSE_DOCKER_CLI_BUILD=0
"${compose[@]}" --profile client build >"$work/build.log" 2>&1 || { tail -n 40 "$work/build.log"; exit 1; }
if docker run --rm --entrypoint python epd-router -c 'import torch' 2>/dev/null; then
  echo "the router image has torch"
  exit 1
fi
for service in router encoder prefill decode; do
  [ "$(docker run --rm --entrypoint id "epd-$service" -u)" != 0 ] || { echo "$service runs as root"; exit 1; }
done

# What a fleet on this machine answers to the same question.
local_answer() {
  .venv/bin/epd up --port 55051 >"$work/epd-up.log" 2>&1 &
  local fleet=$!
  for _ in $(seq 120); do
    grep -q "router at" "$work/epd-up.log" && break
    kill -0 "$fleet" 2>/dev/null || break
    sleep 0.5
  done
  .venv/bin/epd chat --router 127.0.0.1:55051 --image examples/three-shapes.png "describe the image." \
    || cat "$work/epd-up.log"
  kill "$fleet"
  wait "$fleet" || true
}

check_answer() {
  local answer
  answer=$(ask)
  echo "$1: $answer"
  [ "$answer" = "$expected" ] || { "${compose[@]}" logs --tail 60; exit 1; }
}

expected=$(local_answer)
echo "local fleet: $expected"

up() {
  "${compose[@]}" up -d "$@" >"$work/up.log" 2>&1 \
    || { tail -n 40 "$work/up.log"; "${compose[@]}" logs --tail 40; exit 1; }
}

await_decodes() {
  local decodes
  for _ in $(seq 60); do
    client status >"$work/status" 2>/dev/null || true
    decodes=$(grep -c "decode.*serving" "$work/status" || true)
    [ "$decodes" = "$1" ] && return 0
    sleep 1
  done
  cat "$work/status"
  echo "the router sees $decodes decode workers, not $1"
  "${compose[@]}" logs --tail 60
  exit 1
}

up
await_decodes 1
check_answer "four containers"

up --scale decode=3
await_decodes 3
cat "$work/status"
check_answer "with three decode workers"

"${compose[@]}" --profile client down --volumes --timeout 20 >/dev/null 2>&1
echo "compose test passed"
