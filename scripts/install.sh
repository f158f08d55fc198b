#!/usr/bin/env bash
# What make installs into .venv, one step at a time: install.sh torch, then core, then dev.
#
# TORCH=cpu (the default) leaves a torch that is there; else it takes a CPU build from torch's own index, or, where that
# cannot be reached, whatever pip finds: in its index, its cache, or a folder that it was told of (PIP_FIND_LINKS).
# TORCH=cuda takes what the package index has for this system, which on Linux is the CUDA build of some GB.
# TORCH_INDEX is another place of CPU builds, such as a mirror. uv installs the rest if it is at hand; UV= for pip alone.
set -euo pipefail

kind=${TORCH:-cpu}
index=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
uv=${UV-$(command -v uv || true)}
python=.venv/bin/python
wanted=$(grep '^torch==' constraints.txt)

say() { echo "install: $*"; }
fail() { say "$*" >&2; exit 1; }

installed() { # the version of the torch in .venv; nothing if there is none
  "$python" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null || true
}

reach() { # whether an address answers, in at most five seconds, a name that nobody resolves included
  "$python" -c '
import signal, sys, urllib.request
if hasattr(signal, "alarm"): signal.alarm(5)
urllib.request.urlopen(sys.argv[1], timeout=4).close()' "$1" 2>/dev/null
}

pip() { "$python" -m pip install --disable-pip-version-check "$@"; }

brief() { # what is found, downloaded and installed, but not what was there already
  grep --line-buffered -v -E '^(Requirement already satisfied|  (Using cached|Preparing|Getting|Installing|Checking))' || true
}

get() { # install by uv, or by pip where uv is not at hand or finds less: it does not know pip's settings
  if [ -n "$uv" ]; then
    "$uv" pip install --python "$python" "$@" && return
    say "uv could not; pip tries, with its own settings"
  fi
  pip "$@" | brief
}

get_torch() {
  [ "$kind" = cpu ] || [ "$kind" = cuda ] || fail "TORCH=$kind: it is cpu or cuda"
  local there; there=$(installed)
  if [ "$kind" = cuda ] && [ -n "$there" ] && [ -z "$("$python" -c 'import torch; print(torch.version.cuda or "")')" ]; then
    say "torch $there is not a CUDA build: it is replaced"
    "$python" -m pip uninstall --quiet --yes torch
    there=
  fi
  if [ -n "$there" ]; then
    say "torch $there is in .venv and is left (the tests pass with ${wanted#*==})"
  elif [ "$kind" = cuda ]; then
    say "torch with CUDA, of some GB, from the package index"
    pip "$wanted"
    [ -n "$("$python" -c 'import torch; print(torch.version.cuda or "")')" ] ||
      fail "pip found torch $(installed), which is not a CUDA build; see docs/install.md for CUDA on this system"
  elif reach "$index/torch/"; then
    say "torch for the CPU, about 200 MB, from $index (TORCH=cuda for the other)"
    if [ -n "$uv" ]; then "$uv" pip install --python "$python" --index-url "$index" "$wanted"
    else pip --index-url "$index" "$wanted"; fi || { say "that failed; pip tries its own index"; pip "$wanted"; }
  else
    say "$index cannot be reached: torch is what pip finds elsewhere, which may be a CUDA build of some GB"
    pip "$wanted"
  fi
}

case "${1:-}" in
  torch)
    [ -x "$python" ] || { say "an environment of its own, in .venv"; "${PYTHON:-python3}" -m venv .venv; }
    get_torch
    # What follows keeps this torch, whichever it is.
    { grep -v '^torch==' constraints.txt; echo "torch==$(installed)"; } >.venv/constraints.txt
    ;;
  core)
    say "Mutirão and what it needs"
    get --constraint .venv/constraints.txt --editable .
    ;;
  dev)
    say "all extras, and what tests and documentation need"
    "$python" -c '
import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["dev"], sep="\n")' >.venv/dev.txt
    if [ -z "${UV+set}" ] && [ -z "$uv" ]; then # it is among these, and fetches the other two hundred in half the time
      pip --quiet --constraint .venv/constraints.txt uv && uv=.venv/bin/uv
    fi
    # Not timm: it needs a torchvision of the same build as torch. It comes alone, and tests bring a stand-in.
    get --constraint .venv/constraints.txt --requirement .venv/dev.txt --editable '.[all]'
    get --constraint .venv/constraints.txt --no-deps timm
    ;;
  *) fail "usage: scripts/install.sh torch|core|dev" ;;
esac
