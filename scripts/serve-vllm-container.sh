#!/usr/bin/env bash
# serve-vllm-container.sh - start vLLM in a container, in the foreground, with every setting on the command line.
#
#   bash scripts/serve-vllm-container.sh
#   MODEL="$VLLM_MODEL" IMAGE="$VLLM_IMAGE" KV_BYTES="$VLLM_KV_BYTES" bash scripts/serve-vllm-container.sh
#   KV_BYTES= MEM_FRACTION=0.30 bash scripts/serve-vllm-container.sh -- --enforce-eager
#
# Settings, from the environment:
#   IMAGE           container image, already pulled [nvcr.io/nvidia/vllm:26.08-py3]
#   CONTAINER_NAME  name of the container, removed when it stops [vllm-lab]
#   MODELS_DIR      model library on this machine, seen read-only as /models inside [~/models]
#   MODEL           folder with config.json, as seen inside [/models/Qwen/Qwen3-8B-AWQ]
#   SERVED_NAME     the name that requests send as their model [local-chat]
#   PORT            port on this machine, on 127.0.0.1 only [8000]
#   CTX             tokens of context for each sequence (--max-model-len) [4096]
#   MAX_SEQS        sequences in one batch (--max-num-seqs) [20]
#   KV_BYTES        size of the cache in bytes (--kv-cache-memory-bytes); empty: MEM_FRACTION decides []
#   MEM_FRACTION    share of the memory for everything (--gpu-memory-utilization) [0.90]
#   KV_DTYPE        auto, fp8, ... (--kv-cache-dtype) [auto]
#   PREFIX_CACHING  on or off [on]
#   TP_SIZE         GPUs to spread over (--tensor-parallel-size) [1]
#   DOCKER          the container command [docker]
#   LOGFILE         copy of what it prints, new at each start [./vllm-server.log]
#   PIDFILE         process id of the foreground docker command, which passes signals on [./vllm-server.pid]
#
# Flags after -- go to vLLM unchanged. All of its flags: docker run --rm IMAGE vllm serve --help=all
# Prints the settings, then stays in the foreground; Ctrl-C, or docker stop vllm-lab, stops it. Exit: 2 for a
# wrong setting, 1 for a busy port or a container of that name, otherwise the container's own.
set -euo pipefail
here="$(CDPATH=''; f="$0"; while [ -L "$f" ]; do cd -P -- "$(dirname -- "$f")"; f="$(readlink -- "${f##*/}")"; done
  cd -P -- "$(dirname -- "$f")" && pwd)" # also through a symbolic link
# shellcheck source=lib.sh
. "$here/lib.sh"
# shellcheck source=servers.sh
. "$here/servers.sh"

launcher_arguments "vLLM's" "$@"
[ "${1:-}" != -- ] || shift

IMAGE="${IMAGE:-nvcr.io/nvidia/vllm:26.08-py3}"
CONTAINER_NAME="${CONTAINER_NAME:-vllm-lab}"
MODELS_DIR="${MODELS_DIR:-$HOME/models}"
MODEL="${MODEL:-/models/Qwen/Qwen3-8B-AWQ}"
DOCKER="${DOCKER:-docker}"
# shellcheck source=vllm.sh
. "$here/vllm.sh"

container_form='^[A-Za-z0-9][A-Za-z0-9_.-]*$'
[[ "$CONTAINER_NAME" =~ $container_form ]] || die "CONTAINER_NAME '$CONTAINER_NAME' is not a name that docker accepts"

[ -d "$MODELS_DIR" ] || die "there is no folder MODELS_DIR '$MODELS_DIR': set it to your model library"
MODELS_DIR="$(CDPATH='' cd -- "$MODELS_DIR" && pwd)" # a bind mount wants the whole path
case "$MODELS_DIR" in
*,* | *'"'*) die "MODELS_DIR '$MODELS_DIR' holds a comma or a quote, which docker's --mount cannot take: use another path" ;;
esac
case "$MODEL" in
*/../* | */..) die "MODEL '$MODEL' must not climb out of /models" ;;
/models/?*) ;;
*) die "MODEL '$MODEL' must be a folder below /models, which is '$MODELS_DIR' on this machine" ;;
esac
checkpoint="$MODELS_DIR${MODEL#/models}"
[ -f "$checkpoint/config.json" ] || die "there is no checkpoint for MODEL '$MODEL': '$checkpoint/config.json' is missing; fetch the lab's: bash $SCRIPTS_WORD/fetch-models.sh"

need "$DOCKER" "to run the container"
"$DOCKER" image inspect "$IMAGE" >/dev/null 2>&1 ||
  die "there is no container image '$IMAGE' here, or docker does not answer: docker pull $IMAGE"
if "$DOCKER" container inspect "$CONTAINER_NAME" >/dev/null 2>&1; then
  die "there is a container named '$CONTAINER_NAME' already: docker stop $CONTAINER_NAME (or docker rm $CONTAINER_NAME)" 1
fi
refuse_busy_port 127.0.0.1 "$PORT"
open_log "$LOGFILE" "$PIDFILE"

command=("$DOCKER" run --rm --name "$CONTAINER_NAME" --gpus all --ipc=host
  --publish "127.0.0.1:$PORT:8000"
  --mount "type=bind,source=$MODELS_DIR,target=/models,readonly"
  "$IMAGE"
  vllm serve "$MODEL" --served-model-name "$SERVED_NAME" --host 0.0.0.0 --port 8000 "${vllm_flags[@]}" "$@")

say "vLLM, in a container"
show "image" "$IMAGE"
show "container" "$CONTAINER_NAME (removed when it stops)"
show "models" "$MODELS_DIR, read-only as /models"
show "model" "$MODEL, served as $SERVED_NAME"
show "address" "http://127.0.0.1:$PORT/v1 (this machine only)"
show_vllm_settings
show_command "${command[@]}"

copy_output "$LOGFILE"
exec "${command[@]}"
