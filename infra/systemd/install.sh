#!/bin/sh
# Installs and starts the nightly timer, the dispatcher and, if asked, the service; again: updates them.
#   sudo infra/systemd/install.sh data=FOLDER [user=NAME] [work=no] [serve=yes] [units=FOLDER]
# data: the data folder; user: who runs it (default: who called sudo); work=no: the nightly cycle only;
# serve=yes: the service as well (docs/service.md); units: write the unit files there and start nothing.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
data='' user=${SUDO_USER:-$(id -un)} work=yes serve=no units=''
for argument in "$@"; do
    case $argument in
        data=*) data=${argument#*=} ;;
        user=*) user=${argument#*=} ;;
        work=yes | work=no) work=${argument#*=} ;;
        serve=yes | serve=no) serve=${argument#*=} ;;
        units=*) units=${argument#*=} ;;
        *) echo "error: unknown $argument; known: data=, user=, work=yes|no, serve=yes|no, units=" >&2; exit 2 ;;
    esac
done
[ -n "$data" ] || { echo "error: which data folder? data=FOLDER" >&2; exit 2; }
case $root$data in
    *[!A-Za-z0-9_./@+-]*) echo "error: unit files cannot hold this path: $root or $data" >&2; exit 2 ;;
esac
case $data in /*) ;; *) data=$PWD/$data ;; esac
id "$user" >/dev/null 2>&1 || { echo "error: no user $user" >&2; exit 2; }
[ -n "$units" ] || [ -x "$root/.venv/bin/python" ] || { echo "error: no $root/.venv; run make venv first" >&2; exit 2; }

target=${units:-/etc/systemd/system}
mkdir -p "$target"
[ -n "$units" ] || { mkdir -p "$data"; chown "$user" "$data"; }
names='gpufarm-grow.service gpufarm-grow.timer'
[ "$work" = no ] || names="$names gpufarm-work.service"
[ "$serve" = no ] || names="$names gpufarm-serve.service"
for name in $names; do
    sed -e "s|@ROOT@|$root|g" -e "s|@DATA@|$data|g" -e "s|@USER@|$user|g" "$here/$name" >"$target/$name"
done
if [ "$work" = no ]; then  # nothing to make room for
    sed -i -e '/^# One dispatcher works/d' -e '/^\(Conflicts\|OnSuccess\|OnFailure\)=/d' \
        -e 's/ gpufarm-work.service//' "$target/gpufarm-grow.service"
fi
[ -z "$units" ] || { echo "written to $units: $names"; exit 0; }
systemctl daemon-reload
systemctl enable --now gpufarm-grow.timer
[ "$work" = no ] || systemctl enable --now gpufarm-work.service
[ "$serve" = no ] || systemctl enable --now gpufarm-serve.service
systemctl --no-pager list-timers gpufarm-grow.timer
