#!/usr/bin/env bash
# fetch-models.sh - download the models of this machine's track, once.
#
#   bash scripts/fetch-models.sh
#   bash scripts/fetch-models.sh gguf
#
# In the lab's working folder, with the lab.env that lab-env.sh wrote. Models (all of the track's, if none is named):
#   gguf     llama-server's file, 5.0 GB
#   second   the second engine's checkpoint: AWQ, 6.1 GB (S, N); bf16, 16.4 GB (X, where vLLM is optional);
#            MLX 4-bit, 4.6 GB (M); on track S also the container image
# They go where lab.env says they lie. A model that is there with its whole size is left alone; the disk is checked
# before the first byte; each size is checked afterwards. Interrupted, or run again, it goes on where it was.
# Qwen3-8B and its checkpoints are Apache-2.0 and need no account.
#
# Needs Hugging Face's command line tool, hf. From the environment: HF [hf], DOCKER [docker],
# MODELS_DIR [~/models], PYTHON [python3].
# Exit: 1 when a download failed or is not whole, 2 for a wrong setting or a missing tool.
set -euo pipefail
here="$(CDPATH=''; f="$0"; while [ -L "$f" ]; do cd -P -- "$(dirname -- "$f")"; f="$(readlink -- "${f##*/}")"; done
  cd -P -- "$(dirname -- "$f")" && pwd)" # also through a symbolic link
# shellcheck source=lib.sh
. "$here/lib.sh"
# shellcheck source=models.sh
. "$here/models.sh"

wanted=""
while [ $# -gt 0 ]; do
  case "$1" in
  -h | --help) usage; exit 0 ;;
  gguf | second) wanted="$wanted $1" ;;
  *) die "unknown model '$1': gguf or second" ;;
  esac
  shift
done
wanted="${wanted:- gguf second} "

need_python
load_lab_env TRACK GGUF
HF="${HF:-hf}"
DOCKER="${DOCKER:-docker}"

paths=()
image=""
case "$wanted" in *" gguf "*) paths=("$GGUF") ;; esac
case "$wanted" in
*" second "*)
  if [ "$TRACK" = M ]; then
    load_lab_env MLX_MODEL
    paths=(${paths[@]+"${paths[@]}"} "$MLX_MODEL")
  else
    load_lab_env VLLM_MODEL
    paths=(${paths[@]+"${paths[@]}"} "$(vllm_folder)")
    image="${VLLM_IMAGE:-}"
  fi
  ;;
esac

# ------------------------------------------------------------------------------------------------------------
# What is here, and what is to come
# ------------------------------------------------------------------------------------------------------------

trap 'die "interrupted: what has arrived is kept, so run this again to go on" 130' INT
say "fetch-models.sh for track $TRACK"
missing=()
to_fetch=0
for path in ${paths[@]+"${paths[@]}"}; do
  fault="$(model_fault "$path")"
  if [ -z "$fault" ]; then
    say "  here already: '$path'"
    continue
  fi
  [ -n "$(known_model "$path")" ] ||
    die "$fault, and it is not one of the lab's own models: fetch it yourself, or set its place in lab.env"
  say "  to fetch: $fault"
  missing=(${missing[@]+"${missing[@]}"} "$path")
  to_fetch=$((to_fetch + $(known_bytes "$path")))
  [ ! -e "$path" ] || to_fetch=$((to_fetch - $(bytes_in "$path")))
done

if [ "${#missing[@]}" -gt 0 ]; then
  command -v "$HF" >/dev/null 2>&1 ||
    die "cannot find '$HF', Hugging Face's command line tool: $PYTHON -m venv ~/hf && ~/hf/bin/pip install huggingface_hub, then HF=~/hf/bin/hf bash $SCRIPTS_WORD/fetch-models.sh"
  fault="$(disk_fault "$(dirname -- "${missing[0]}")" "$to_fetch")"
  [ -z "$fault" ] || die "$fault: free some, or put the models on another disk and set their places in lab.env" 1
fi

# ------------------------------------------------------------------------------------------------------------
# Fetching
# ------------------------------------------------------------------------------------------------------------

for path in ${missing[@]+"${missing[@]}"}; do
  known="$(known_model "$path")"
  step "${known% *}, $(with_commas "${known#* }") bytes"
  case "$path" in
  *.gguf) download=("$HF" download "${known% *}" "$(basename -- "$path")" --local-dir "$(dirname -- "$path")") ;;
  *) download=("$HF" download "${known% *}" --local-dir "$path") ;;
  esac
  show_command "${download[@]}"
  "${download[@]}" || die "the download of '$path' broke off: what has arrived is kept, so run this again" 1
  fault="$(model_fault "$path")"
  [ -z "$fault" ] || die "$fault: run this again; if that changes nothing, remove it and fetch it anew" 1
  say "  whole: '$path'"
done

if [ -n "$image" ]; then
  need "$DOCKER" "to fetch vLLM's container"
  if "$DOCKER" image inspect "$image" >/dev/null 2>&1; then
    say "  here already: image $image"
  else
    step "the container image $image"
    show_command "$DOCKER" pull "$image"
    "$DOCKER" pull "$image" || die "docker pull $image failed: run this again" 1
  fi
fi

say "next: bash $SCRIPTS_WORD/preflight.sh"
