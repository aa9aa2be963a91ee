"""The chart and the Compose files against Helm, Kubernetes' schemas and Compose's: `make test-deploy`."""

from __future__ import annotations

import importlib.util

#: The schemas are in .venv-deploy alone.
collect_ignore_glob = [] if importlib.util.find_spec("kubernetes_validate") else ["test_*.py"]
