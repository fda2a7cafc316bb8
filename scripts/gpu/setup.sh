# Source this on a bare CUDA + PyTorch machine: installs the wheels of scripts/gpu/wheels.sh beside the system's packages.
# usage: . scripts/gpu/setup.sh [WHEELDIR …]
site=${OCTAVO_GPU_SITE:-/tmp/octavo-site}
for wheels in "${@:-.whl}"; do
    if ls "$wheels"/*.whl >/dev/null 2>&1; then
        python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "$wheels"/*.whl 2>&1 | grep -v 'WARNING: Target directory' || true
    fi
done
export PYTHONPATH="$PWD:$site" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
# Installed packages have their modules compiled; where an image was built without, and writing is off, each start compiles torch anew.
export PYTHONDONTWRITEBYTECODE= PYTHONPYCACHEPREFIX=${PYTHONPYCACHEPREFIX:-/tmp/octavo-pyc}
