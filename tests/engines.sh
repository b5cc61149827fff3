#!/bin/sh
# Installs what some tests need: OpenSSH's server, Slurm with munge, iproute2 for hosts with networks of their own, and
# Chromium for JupyterLab. On Debian and its like, as root or with sudo that asks for nothing; elsewhere those tests are
# skipped, and say why. Nothing is started, now or when the machine boots.
# ENGINES=no leaves the machine as it is.
set -eu

missing=""
need() { # COMMAND PACKAGE...
    PATH="$PATH:/usr/sbin:/sbin" command -v "$1" >/dev/null 2>&1 || { shift; missing="$missing $*"; }
}
need sshd openssh-server
need ssh-keygen openssh-client
need slurmctld slurmctld
need slurmd slurmd
need sbatch slurm-client
need munged munge
need ip iproute2
need chromium chromium fonts-dejavu-core
[ -n "$missing" ] || exit 0

skip() {
    echo "not installed:$missing ($1); the tests that need them are skipped" >&2
    exit 0
}
[ "${ENGINES:-yes}" != no ] || skip "ENGINES=no"
command -v apt-get >/dev/null 2>&1 || skip "no apt-get here"
as_root=""
if [ "$(id -u)" != 0 ]; then
    sudo -n true 2>/dev/null || skip "neither root nor sudo without a password"
    as_root="sudo -n"
fi

# A package that is installed starts its services, unless this program says no; one that is there already is left alone.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' | $as_root tee "$policy" >/dev/null
    $as_root chmod 755 "$policy"
    trap '$as_root rm -f "$policy"' EXIT
fi
log=$(mktemp)
install() {
    # shellcheck disable=SC2086
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet --no-install-recommends $missing >"$log" 2>&1
}
echo "installing$missing" >&2
if ! install; then
    $as_root apt-get update --quiet >/dev/null 2>&1 || true
    install || { tail -n 3 "$log" >&2; rm -f "$log"; skip "apt-get failed"; }
fi
rm -f "$log"
if [ -d /run/systemd/system ]; then # else they would start with the machine
    for pair in openssh-server:ssh slurmctld:slurmctld slurmd:slurmd munge:munge; do
        case " $missing " in
        *" ${pair%:*} "*) $as_root systemctl --quiet disable --now "${pair#*:}" 2>/dev/null || true ;;
        esac
    done
fi
