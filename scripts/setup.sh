#!/bin/sh
# Makes .venv ready: checks this machine, then installs this tree (editable) with the versions in constraints.txt.
# A second run finds its stamp and does nothing; a run that was cut off is continued by the next one.
#
#   PYTHON=python3.12   the interpreter to use, 3.11 or newer
#   TORCH_INDEX=URL     take torch, and nothing else, from this package index
#   SETUP_ANYWAY=1      warn where the memory or the disk check would stop
#   SETUP_MEMORY_MB=N, SETUP_FREE_MB=N   stand in for what the machine has (used by the tests)
set -eu
cd "$(dirname "$0")/.."
root=$(pwd -P)
log=.venv/setup.log
stamp=.venv/setup-stamp

# Inherited settings that would keep start-up slow, hide missing packages from pip, or send them elsewhere.
no_bytecode=${PYTHONDONTWRITEBYTECODE:-}
unset PYTHONDONTWRITEBYTECODE PYTHONPATH PYTHONHOME
export PIP_USER=0 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf 'setup: %s\n' "$*"; }

stop() {
    printf 'setup: stopped: %s\n' "$*" >&2
    exit 1
}

heartbeat() {
    seconds=0
    while kill -0 "$$" 2>/dev/null; do
        # The sleep outlives a kill of this loop, so it must not hold the caller's pipes open.
        sleep 15 >/dev/null 2>&1
        seconds=$((seconds + 15))
        say "  ... still working, $seconds s"
    done
}

# run WHAT COMMAND...: says WHAT, keeps the command's own output in the log and shows its end only on failure.
run() {
    say "$1"
    shift
    heartbeat &
    beat=$!
    trap 'kill "$beat" 2>/dev/null || :' EXIT
    trap 'exit 130' INT TERM HUP
    failed=
    "$@" >>"$log" 2>&1 </dev/null || failed=yes
    kill "$beat" 2>/dev/null || :
    wait "$beat" 2>/dev/null || :
    trap - EXIT INT TERM HUP
    [ -z "$failed" ] || {
        tail -n 15 "$log" >&2
        stop "that failed; the lines above are the end of $log. Run the same command again to go on from here."
    }
}

version_of() { "$1" -c 'import platform; print(platform.python_version())' 2>/dev/null || :; }

new_enough() {
    case $1 in
        3.[0-9] | 3.[0-9].* | 3.10 | 3.10.*) return 1 ;;
        3.* | [4-9].*) return 0 ;;
        *) return 1 ;;
    esac
}

# A .venv of a moved or copied tree starts, but its scripts point at the old place.
venv_works() {
    grep -qF "$root/.venv" .venv/bin/activate 2>/dev/null && .venv/bin/python -c 'import pip' 2>/dev/null
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        set -- "$PYTHON"
    elif venv_works; then
        set -- .venv/bin/python
    else
        set -- python3 python3.14 python3.13 python3.12 python3.11 python
    fi
    found=
    for python in "$@"; do
        version=$(version_of "$python")
        if new_enough "$version"; then return; fi
        [ -z "$version" ] || found="$found; $python is Python $version"
    done
    stop "Python 3.11 or newer is needed$found. Install one, or name it: make PYTHON=/path/to/python3.12 ..."
}

# Everything that decides what belongs into .venv.
stamp_now() {
    "$python" -I -c '
import hashlib, platform, sys
inputs = b"".join(open(path, "rb").read() for path in sys.argv[2:])
print(hashlib.sha256(inputs).hexdigest(), platform.python_version(), sys.argv[1])
' "$root" pyproject.toml constraints.txt scripts/setup.sh
}

# The machine's memory, or a container's limit where that is less; nothing where neither can be read.
memory_mb() {
    if [ -n "${SETUP_MEMORY_MB:-}" ]; then
        echo "$SETUP_MEMORY_MB"
    elif [ -r /proc/meminfo ]; then
        cat /proc/meminfo /sys/fs/cgroup/memory.max 2>/dev/null | awk '
            /^MemTotal:/ { mb = $2 / 1024 }
            /^[0-9]+$/ { if ($1 / 1048576 < mb) mb = $1 / 1048576 }
            END { print int(mb) }'
    else
        sysctl -n hw.memsize 2>/dev/null | awk '{ print int($1 / 1048576) }'
    fi
}

free_mb() { echo "${SETUP_FREE_MB:-$(df -Pk . | awk 'NR == 2 { print int($4 / 1024) }')}"; }

# need WHAT HAVE_MB WANTED_MB HINT
need() {
    if [ -z "$2" ] || [ "$2" -ge "$3" ]; then return; fi
    shortage="$1: $2 MB here, about $3 MB needed. $4"
    [ -n "${SETUP_ANYWAY:-}" ] || stop "$shortage (SETUP_ANYWAY=1 goes on all the same.)"
    say "warning: $shortage"
}

check_machine() {
    say "Python $version ($python)"
    need "memory" "$(memory_mb)" 5500 "The demo and the tests run a real language model."
    present=0
    [ ! -d .venv ] || present=$(du -sk .venv | awk '{ print int($1 / 1024) }')
    room=$((7000 - present))
    [ "$room" -gt 1000 ] || room=1000
    need "free disk" "$(free_mb)" "$room" "Packages, the model and the caches take it."
}

make_venv() {
    if venv_works && [ "$(version_of .venv/bin/python)" = "$version" ]; then
        say "completing the .venv that is here"
        # pip writes INSTALLER last of all: without it, the package was cut off half-way and is taken again.
        for package in .venv/lib/python*/site-packages/*.dist-info; do
            [ -f "$package/INSTALLER" ] || rm -rf "$package"
        done
        return
    fi
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        stop "$python lacks its venv module (on Debian and Ubuntu: apt install python3-venv)."
    rm -rf .venv
    mkdir .venv
    run "making .venv" "$python" -m venv .venv
}

# What is imported here is compiled at first use: a third of the time that pip takes to compile all of it.
install() { .venv/bin/python -m pip install --no-compile --constraint constraints.txt "$@"; }

get_torch() {
    if .venv/bin/python -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null; then return; fi
    if [ -n "${TORCH_INDEX:-}" ]; then
        run "installing torch from the index that TORCH_INDEX names" install --no-deps --index-url "$TORCH_INDEX" torch
        return
    fi
    run "asking pip which build of torch it would take" install --dry-run --no-deps --report .venv/torch.json torch
    if [ "$(.venv/bin/python scripts/torch_build.py <.venv/torch.json)" = cpu ]; then
        say "it is a CPU build"
        return
    fi
    say "it is the CUDA build: several GB of downloads, about 7 GB on disk."
    say "To avoid it, press Ctrl-C and set TORCH_INDEX to the CPU index that pytorch.org gives under 'Get started'."
    need "free disk" "$(free_mb)" 12000 "The CUDA build of torch needs it; TORCH_INDEX=(a CPU index) avoids it."
}

install_all() {
    run "installing pip, setuptools and wheel" install 'pip>=24.2' 'setuptools>=77' wheel packaging
    get_torch
    run "installing teachercache and the packages it needs (a minute or more)" install --no-build-isolation -e '.[dev]'
    # mypy has to meet the tree under its import name.
    mkdir -p .venv/house
    ln -sfn ../.. .venv/house/teachercache
    # Whoever forbids Python to write bytecode would otherwise wait for torch to compile at every start.
    [ -z "$no_bytecode" ] || run "compiling torch and transformers once" .venv/bin/python -c "
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast"
}

find_python
if [ "$(cat "$stamp" 2>/dev/null)" = "$(stamp_now)" ]; then
    say "everything is in place (.venv, Python $version)"
    exit 0
fi
check_machine
make_venv
rm -f "$stamp"
install_all
stamp_now >"$stamp.new"
mv "$stamp.new" "$stamp"
say "ready"
