# shellcheck shell=bash
# models.sh - the models that the lab downloads: what a whole one weighs, and what lies on this machine. Sourced
# after lib.sh by fetch-models.sh and preflight.sh.

# known_model PATH - "REPOSITORY BYTES" of one of the lab's own models, by the last part of its path; else nothing.
known_model() {
  case "$1" in
  */Qwen3-8B-Q4_K_M.gguf) echo "unsloth/Qwen3-8B-GGUF 5027784512" ;;
  */Qwen3-8B-AWQ) echo "Qwen/Qwen3-8B-AWQ 6114568235" ;;
  */Qwen3-8B) echo "Qwen/Qwen3-8B 16397461266" ;;
  */Qwen3-8B-4bit) echo "mlx-community/Qwen3-8B-4bit 4600000000" ;; # only known to be about that
  esac
}

# known_bytes PATH - what it weighs, or 0.
known_bytes() {
  local known
  known="$(known_model "$1")"
  echo "${known##* }" | grep . || echo 0
}

# bytes_in PATH - of a file, or of the files of a folder (not of its hidden folders).
bytes_in() {
  "$PYTHON" -c 'import os, sys
path = sys.argv[1]
if os.path.isfile(path):
    print(os.path.getsize(path))
else:
    print(sum(e.stat().st_size for e in os.scandir(path) if e.is_file() and not e.name.startswith(".")))' "$1"
}

# with_commas NUMBER
with_commas() { "$PYTHON" -c 'import sys; print(format(int(sys.argv[1]), ","))' "$1"; }

# model_fault PATH - why this model cannot be used; nothing where it is whole, as far as a size can tell.
model_fault() {
  local size known
  known="$(known_bytes "$1")"
  if [ ! -e "$1" ]; then
    echo "there is no '$1'"
    return
  elif [ -d "$1" ] && [ ! -f "$1/config.json" ]; then
    echo "there is no config.json in '$1'"
    return
  elif [ -f "$1" ] && [ "$(head -c 4 "$1" | tr -d '\0')" != GGUF ]; then
    echo "'$1' does not begin with GGUF: another kind of file, or a pointer left by git"
    return
  fi
  size="$(bytes_in "$1")"
  # A folder may hold a readme more or less; a file is complete or not.
  if [ "$known" -eq 0 ] || { [ -f "$1" ] && [ "$size" -eq "$known" ]; } ||
    { [ -d "$1" ] && [ $((size / 98)) -ge $((known / 100)) ]; }; then
    return
  fi
  echo "$(with_commas "$size") bytes in '$1', expected $(with_commas "$known"): the download is not complete"
}

# disk_fault PLACE BYTES - why BYTES more and a GiB for logs and records do not fit there; nothing where they do.
disk_fault() {
  local place="$1" free need
  while [ ! -d "$place" ]; do place="$(dirname -- "$place")"; done
  free="$(df -Pk "$place" | awk 'NR == 2 { print $4 }')"
  need=$(($2 / 1024 + 1048576))
  [ "$free" -ge "$need" ] || echo "$((free / 1048576)) GiB free at '$place', $((need / 1048576)) GiB needed"
}
