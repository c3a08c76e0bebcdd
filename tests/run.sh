#!/usr/bin/env bash
# Check everything: style, types, shell scripts, the whole suite, and the programs once more under Python 3.9.
#
#   bash tests/run.sh
#   bash tests/run.sh -k notebook -x      # arguments go to pytest
#
# Needs Python 3.10 or later; the tools and engines are installed once, into a private environment outside the
# repository (see tests/private-env.sh). The tests run in four processes side by side, or in two for each core.
# The programs promise Python 3.9, so their tests run a second time under it: a python3.9 on PATH, or one that pyenv
# has. Left out there is what cannot depend on its version: the engines (their packages need 3.10), the bash scripts
# (they call the programs, which are tested themselves) and what is drawn in a browser.
#
#   REQUIRE_PY39=1     fail where there is no Python 3.9 (else it is said and left out)
#   PYTHON             interpreter for the first run
# Exit: 0 when every step passed, 1 when one did not (the last line names it), 2 when the tools cannot be had.
set -euo pipefail

case ${1-} in
  -h | --help)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
esac

cd "$(dirname "$0")/.."
failed=""

# Run one step; a failure is noted and the rest still runs, so that one run shows all that is wrong.
step() {
  local name=$1
  shift
  printf '\n== %s\n' "$name"
  "$@" || failed="$failed${failed:+, }$name"
}

find_python39() {
  local candidate
  for candidate in python3.9 "$(pyenv root 2>/dev/null || true)"/versions/3.9*/bin/python3.9; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 9))' 2>/dev/null; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  return 1
}

# pytest, where "no test matches these arguments" is no failure: they were chosen for the other run.
pytest_some() {
  local status=0
  "$@" || status=$?
  [ "$status" -eq 5 ] || return "$status"
}

# Named here and nowhere else: a new file of tests runs under both.
only_once=(test_draw_curve.py test_engines_run.py test_lab_scripts.py test_lab_steps.py test_launchers.py
  test_serve_llama_script.py test_smoke_cpu.py)

python=$(bash tests/private-env.sh dev engines)
scripts=$(git ls-files --cached --others --exclude-standard -- '*.sh' .ci/run)

step "ruff check" "$python" -m ruff check .
step "ruff format" "$python" -m ruff format --check .
step "mypy" "$python" -m mypy
# shellcheck disable=SC2086  # script names of this repository hold no spaces
step "shellcheck" "$(dirname "$python")/shellcheck" $scripts
cores=$(getconf _NPROCESSORS_ONLN)
side_by_side=(-n "$((cores > 2 ? 2 * cores : 4))" --dist worksteal)
step "pytest" env REQUIRE_ENGINES=1 "$python" -m pytest "${side_by_side[@]}" "$@"

if python39=$(find_python39); then
  python39=$(PYTHON=$python39 bash tests/private-env.sh --oldest 3.9 test)
  step "pytest under Python 3.9" pytest_some "$python39" -m pytest -p no:cacheprovider "${side_by_side[@]}" \
    "${only_once[@]/#/--ignore=tests/}" "$@"
else
  printf '\n== Python 3.9: none found (python3.9 on PATH, pyenv): that run is left out\n'
  [ "${REQUIRE_PY39:-0}" != 1 ] || failed="$failed${failed:+, }Python 3.9 is missing"
fi

if [ -n "$failed" ]; then
  printf '\ntests/run.sh: FAILED: %s\n' "$failed"
  exit 1
fi
printf '\ntests/run.sh: everything passed\n'
