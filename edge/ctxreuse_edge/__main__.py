"""``python -m ctxreuse_edge`` is ``ctxreuse-edge``."""

from ctxreuse_edge.cli import main

if __name__ == "__main__":
    main()
