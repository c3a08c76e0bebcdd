#!/usr/bin/env bash
# lab-env.sh - write lab.env, the lab's settings for this machine, each number's reason beside it.
#
#   bash scripts/lab-env.sh TRACK [MEMORY_GB]
#   bash scripts/lab-env.sh N 16
#   bash scripts/lab-env.sh M
#
# TRACK      S  DGX Spark, vLLM in the NGC container
#            X  AMD Ryzen AI Max+ 395, llama-server on Vulkan, vLLM from ROCm wheels where it starts
#            M  Apple silicon, llama-server and mlx_lm.server
#            N  NVIDIA desktop or laptop, vLLM natively
# MEMORY_GB  memory that models can use, in GB: the GPU's on N, the machine's elsewhere; read from the machine
#            when left out (S: 128)
#
# lab.env lands in the current folder, the lab's working folder. Read it in every terminal with: . ./lab.env
# Running this again brings the file up to date, but never overwrites one that you edited: the difference is
# shown and nothing is written. From the environment: LLAMA_BIN (folder or binary) and GGUF, where yours differ.
# Exit: 1 for an edited lab.env, 2 for a wrong track or memory size.
set -euo pipefail
here="$(CDPATH=''; f="$0"; while [ -L "$f" ]; do cd -P -- "$(dirname -- "$f")"; f="$(readlink -- "${f##*/}")"; done
  cd -P -- "$(dirname -- "$f")" && pwd)" # also through a symbolic link
# shellcheck source=lib.sh
. "$here/lib.sh"

case "${1:-}" in
-h | --help) usage; exit 0 ;;
esac
[ $# -ge 1 ] && [ $# -le 2 ] || die "one track and at most one memory size: bash scripts/lab-env.sh S|X|M|N [MEMORY_GB]"

track="$1"
case "$track" in
s) track=S ;; x) track=X ;; m) track=M ;; n) track=N ;;
esac
case "$track" in
S | X | M | N) ;;
*) die "track must be S, X, M or N, not '$1'" ;;
esac

# ------------------------------------------------------------------------------------------------------------
# The machine
# ------------------------------------------------------------------------------------------------------------

first_line() { sed -n '/[^[:space:]]/{s/^[[:space:]]*//;s/[[:space:]]*$//;p;q;}'; }

# gpu_fact FIELD - one field of the first NVIDIA GPU, or nothing.
gpu_fact() { nvidia-smi --query-gpu="$1" --format=csv,noheader,nounits 2>/dev/null | first_line || true; }

# machine_memory - in GB, or nothing.
machine_memory() {
  local bytes kib
  if [ -r /proc/meminfo ]; then
    kib="$(awk '$1 == "MemTotal:" { print $2 }' /proc/meminfo)"
    printf '%s' "$(( (kib + 524288) / 1048576 ))"
  elif bytes="$(sysctl -n hw.memsize 2>/dev/null)"; then
    printf '%s' "$((bytes / 1073741824))"
  fi
}

memory="${2:-}"
if [ -z "$memory" ]; then
  case "$track" in
  S) memory=128 ;;
  N)
    mib="$(gpu_fact memory.total)"
    case "$mib" in
    '' | *[!0-9]*) die "nvidia-smi tells no memory size: give it, as in: bash scripts/lab-env.sh N 24" ;;
    esac
    memory="$(( (mib + 512) / 1024 ))"
    ;;
  *)
    memory="$(machine_memory)"
    [ -n "$memory" ] || die "cannot read this machine's memory size: give it, as in: bash scripts/lab-env.sh $track 32"
    ;;
  esac
fi
need_number MEMORY_GB "$memory"
[ "$memory" -ge 16 ] ||
  die "with $memory GB there is no tier: weights (4.7 GiB), the smallest pool and the buffers need 16 GB; use another machine"

case "$track" in
S) host="DGX Spark, $memory GB unified" ;;
X) host="AMD Ryzen AI Max+ 395, $memory GB unified" ;;
M) host="$(sysctl -n machdep.cpu.brand_string 2>/dev/null || echo 'Apple silicon'), $memory GB unified" ;;
N) host="$(gpu_fact name)" && host="${host:-NVIDIA GPU}, $memory GB" ;;
esac

# ------------------------------------------------------------------------------------------------------------
# The tier: slots, cache types, pool
# ------------------------------------------------------------------------------------------------------------

slots=20
slots_why="one slot for each of twenty users"
kv_type=f16
kv_why="there is room for 20 x 4,096 tokens x 147,456 B = 11.25 GiB beside the weights"
alt_type=q8_0
alt_why="34/64 of f16: the variant that halves the pool"
if { [ "$track" = M ] && [ "$memory" -lt 32 ]; } || { [ "$track" = N ] && [ "$memory" -lt 24 ]; }; then
  kv_type=q8_0
  alt_type=q4_0
  alt_why="18/34 of q8_0: the variant that halves the pool again"
  if [ "$track" = M ]; then
    slots=10
    slots_why="a Mac of $memory GB shares its memory: half of the users hold a slot, the others wait"
    kv_why="10 x 4,096 tokens x 78,336 B = 2.99 GiB beside the weights; f16 would take 5.62"
  else
    kv_why="20 x 4,096 tokens x 78,336 B = 5.98 GiB beside the weights; f16 would take 11.25 of $memory GB"
  fi
fi

kv_dtype=auto
kv_bytes=12079595520
kv_bytes_why="81,920 tokens x 147,456 B: as many tokens as llama-server's pool holds"
if [ "$track" = N ] && [ "$memory" -lt 24 ]; then
  kv_dtype=fp8
  kv_bytes=6039797760
  kv_bytes_why="81,920 tokens x 73,728 B (one byte a value): as many tokens as llama-server's pool holds"
fi

case "$track" in
S)
  fraction_a=0.30 fraction_b=0.40
  fraction_why="of $memory GB that the whole machine shares; the difference of the two is what one step buys"
  ;;
X)
  fraction_a=0.40 fraction_b=0.50
  fraction_why="the bf16 weights alone are 15.26 GiB; on 64 GB take 0.2 more if vLLM finds no cache blocks"
  ;;
N)
  fraction_a=0.90
  fraction_b=0.80
  if [ "$memory" -lt 24 ]; then fraction_b=0.85; fi
  fraction_why="of the GPU's $memory GB; the rest stays for the desktop and other programs"
  ;;
esac

# ------------------------------------------------------------------------------------------------------------
# llama-server
# ------------------------------------------------------------------------------------------------------------

llama="${LLAMA_BIN:-}"
if [ -z "$llama" ]; then
  llama="$HOME/llama.cpp/build/bin"
  [ -x "$llama/llama-server" ] || llama="$(command -v llama-server || printf '%s' "$llama")"
fi
llama_server="$llama"
[ -d "$llama" ] && llama_server="$llama/llama-server"
version="$("$llama_server" --version 2>&1 | sed -n 's/^version: *//p' | first_line || true)"

# quoted TEXT - as one shell word.
quoted() { printf "'%s'" "${1//$QUOTE/$QUOTED_QUOTE}"; }

# under_home PATH - quoted for lab.env, with $HOME left to be filled in where the path begins with it.
# shellcheck disable=SC2016  # $HOME is for whoever reads lab.env
under_home() {
  case "$1" in
  *[\"\`\$\\]*) quoted "$1" ;;
  "$HOME"/*) printf '"$HOME/%s"' "${1#"$HOME"/}" ;;
  *) printf '"%s"' "$1" ;;
  esac
}

gguf="${GGUF:-$HOME/models/unsloth/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf}"

# setting NAME WORD REASON - one exported line with its reason beside it.
setting() { printf 'export %s=%s  # %s\n' "$1" "$2" "$3"; }

# shellcheck disable=SC2016  # as above
body() {
  printf '# lab.env - the settings of track %s with %s GB, written by lab-env.sh. In every terminal: . ./lab.env\n' "$track" "$memory"
  printf '# Edit what differs on your machine: an edited file is never overwritten.\n\n'
  setting TRACK "$track" "the lab's steps look at it"
  setting MEMORY_GB "$memory" "what the tier below was chosen for"
  setting HOST_DESC "$(quoted "$host")" "goes into every record"
  printf '\n# llama-server\n'
  setting GGUF "$(under_home "$gguf")" "Q4_K_M of Qwen3-8B is 5,027,784,512 bytes"
  setting LLAMA_BIN "$(under_home "$llama")" "folder of llama-server, or the binary"
  setting LLAMA_VERSION "$(quoted "${version:-unknown}")" "the version line of llama-server --version"
  setting SLOTS "$slots" "$slots_why"
  setting KV_TYPE "$kv_type" "$kv_why"
  setting ALT_KV_TYPE "$alt_type" "$alt_why"
  if [ "$track" = M ]; then
    printf '\n# mlx_lm.server\n'
    setting MLX_MODEL '"$HOME/models/mlx-community/Qwen3-8B-4bit"' "4.6 GB; requests send this absolute path as their model"
    setting MLX_VENV '"$HOME/mlx/.venv"' "where mlx-lm is installed"
    return
  fi
  printf '\n# vLLM\n'
  if [ "$track" = S ]; then
    setting VLLM_IMAGE "nvcr.io/nvidia/vllm:26.08-py3" "the container that runs on this machine"
    setting VLLM_MODEL "/models/Qwen/Qwen3-8B-AWQ" "as seen inside the container; 6,114,568,235 bytes"
    setting VLLM_QUANT AWQ "four-bit weights, as the GGUF's are"
  else
    setting VLLM_IMAGE "''" "none: vLLM runs natively"
    if [ "$track" = X ]; then
      setting VLLM_MODEL '"$HOME/models/Qwen/Qwen3-8B"' "16,397,461,266 bytes"
      setting VLLM_QUANT bf16 "two-byte weights (15.26 GiB): compare the shape of the curve, not its height"
    else
      setting VLLM_MODEL '"$HOME/models/Qwen/Qwen3-8B-AWQ"' "6,114,568,235 bytes"
      setting VLLM_QUANT AWQ "four-bit weights, as the GGUF's are"
    fi
  fi
  setting VLLM_VENV '"$HOME/vllm/.venv"' "where vLLM is installed, if natively"
  setting VLLM_KV_DTYPE "$kv_dtype" "type of vLLM's cache"
  setting VLLM_KV_BYTES "$kv_bytes" "$kv_bytes_why"
  setting MEM_FRACTION_A "$fraction_a" "$fraction_why"
  setting MEM_FRACTION_B "$fraction_b" "the second fraction to predict and to read"
}

# checksum_of FILE - of everything but its last line, which holds it.
checksum_of() { sed '$d' "$1" | cksum | awk '{ print $1 "-" $2 }'; }

new="$(mktemp "${TMPDIR:-/tmp}/lab.env.XXXXXX")" || die "cannot make a temporary file" 1
trap 'rm -f "$new"' EXIT
body >"$new"
printf '# unedited: %s\n' "$(cksum <"$new" | awk '{ print $1 "-" $2 }')" >>"$new"

say "lab-env.sh writes lab.env for track $track with $memory GB into $PWD"
if [ -e lab.env ]; then
  [ -f lab.env ] || die "lab.env is not a file" 1
  if [ "$(tail -n 1 lab.env)" != "# unedited: $(checksum_of lab.env)" ]; then
    say "lab.env was edited, so it stays as it is. What a new one would change (< yours, > new):"
    diff lab.env "$new" || true
    die "lab.env was edited and is kept: carry over by hand what you want, or move it away and run this again" 1
  fi
fi
cat "$new" >lab.env || die "cannot write lab.env in '$PWD'" 1
grep '^export' lab.env | sed 's/^export /  /'
[ -n "$version" ] || say "  note: no llama-server at '$llama': set LLAMA_BIN, here or in lab.env, once it is built"
say "next: . ./lab.env && bash $SCRIPTS_WORD/fetch-models.sh && bash $SCRIPTS_WORD/preflight.sh"
