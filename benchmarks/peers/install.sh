#!/usr/bin/env bash
# Make one virtual environment per peer under the folder given (default: .peers).
# Each peer is installed on its own: when one fails, the others still go on.
set -u

root=${1:-.peers}
python=${PYTHON:-python3}
mkdir -p "$root"

# The same CPU build of torch goes first everywhere, so that no peer pulls another.
venv() {
    "$python" -m venv "$root/$1" && "$root/$1/bin/pip" install -q torch==2.13.0 numpy
}

install_pfl() {
    venv pfl && "$root/pfl/bin/pip" install -q torch==2.13.0 pfl==0.6.0
}

install_flower() {
    venv flower &&
        "$root/flower/bin/pip" install -q torch==2.13.0 'flwr[simulation]==1.41.0' psutil
}

# FLGo asks for torchvision, which it needs for its image tasks only.
install_flgo() {
    venv flgo &&
        "$root/flgo/bin/pip" install -q torch==2.13.0 tqdm scipy matplotlib prettytable ujson \
            pynvml pyyaml networkx requests toolz &&
        "$root/flgo/bin/pip" install -q --no-deps flgo==0.4.4
}

# APPFL asks for much that a simulation does not import (cloud, Ray, torchvision through piq).
install_appfl() {
    venv appfl &&
        "$root/appfl/bin/pip" install -q torch==2.13.0 omegaconf opacus wandb scikit-learn \
            matplotlib pandas seaborn colorama lz4 &&
        "$root/appfl/bin/pip" install -q --no-deps appfl==1.12.0
}

failed=0
for peer in pfl flgo appfl flower; do
    if "install_$peer"; then
        echo "$peer: installed"
    else
        echo "$peer: FAILED" >&2
        failed=1
    fi
done
exit "$failed"
