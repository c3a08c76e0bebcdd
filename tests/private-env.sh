#!/usr/bin/env bash
# Make, once, a private Python environment with dependency groups of pyproject.toml, and print its interpreter.
#
#   python=$(bash tests/private-env.sh engines)
#   python=$(PYTHON=python3.9 bash tests/private-env.sh --oldest 3.9 test)
#
# It lies outside the repository, in ${XDG_CACHE_HOME:-$HOME/.cache}/llm-load-lab, under a name that holds the
# groups, the Python version and a checksum of pyproject.toml: a changed pin gives a new one. To be rid of all
# of them, remove that folder. Run the tools in it as `"$python" -m TOOL`.
#
#   PYTHON          interpreter to build it with (default: python3, else the newest python3.N found)
#   --oldest X.Y    refuse an older Python (default 3.10, which the engines' packages need)
# Exit: 2 when there is no such Python, a group is missing or an installation failed.
set -euo pipefail

die() {
  printf 'private-env: %s\n' "$*" >&2
  exit 2
}

usage() {
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
}

oldest=3.10
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help)
      usage
      exit 0
      ;;
    --oldest)
      [ $# -ge 2 ] || die "--oldest needs a version"
      oldest=$2
      shift 2
      ;;
    -*) die "unknown option $1 (see --help)" ;;
    *) break ;;
  esac
done
[ $# -gt 0 ] || die "name at least one dependency group of pyproject.toml"

cd "$(dirname "$0")/.."

is_new_enough() {
  "$1" -c 'import sys; sys.exit(sys.version_info[:2] < tuple(map(int, sys.argv[1].split("."))))' "$oldest" 2>/dev/null
}

python=""
for candidate in ${PYTHON:+"$PYTHON"} python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
  if is_new_enough "$candidate"; then
    python=$candidate
    break
  fi
  [ -z "${PYTHON:-}" ] || die "PYTHON=$PYTHON does not run, or is older than $oldest"
done
[ -n "$python" ] || die "no Python $oldest or later on PATH: install one, or name it in PYTHON"

# cksum is in every Unix; all that it has to do is to tell one pyproject.toml from another.
groups=$(printf '%s-' "$@")
version=$("$python" -c 'import platform; print(platform.python_version())')
checksum=$(cksum <pyproject.toml | cut -d ' ' -f 1)
folder=${XDG_CACHE_HOME:-$HOME/.cache}/llm-load-lab/$groups$version-$checksum

if [ ! -d "$folder" ]; then
  # Built beside its place and then moved there, so that an unfinished one is never taken for a whole one.
  building=$folder.$$
  log=$folder.log
  trap 'rm -rf "$building"' EXIT
  mkdir -p "$(dirname "$folder")" || die "cannot make $(dirname "$folder"): set XDG_CACHE_HOME to a folder of yours"
  printf 'private-env: installing group(s) %s, once, into %s\n' "$*" "$folder" >&2
  "$python" -m venv "$building" >"$log" 2>&1 ||
    die "$python -m venv failed (Debian has it in the package python3-venv); its last line: $(tail -n 1 "$log")"
  pip() {
    "$building/bin/python" -m pip --disable-pip-version-check --no-input "$@" </dev/null >>"$log" 2>&1
  }
  if ! "$building/bin/python" -m pip install --help | grep -q -e --group; then
    pip install --upgrade 'pip>=25.1' || die "upgrading pip failed: see $log"
  fi
  for group in "$@"; do
    set -- "$@" --group "$group"
    shift
  done
  pip install "$@" || die "installing failed, see $log; its last line: $(tail -n 1 "$log")"
  # Whoever was faster built the same thing.
  [ -d "$folder" ] || mv "$building" "$folder"
fi

printf '%s\n' "$folder/bin/python"
