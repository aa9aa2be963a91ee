"""``python -m ctxreuse_cloud`` is ``ctxreuse-cloud``."""

from ctxreuse_cloud.cli import main

if __name__ == "__main__":
    main()
