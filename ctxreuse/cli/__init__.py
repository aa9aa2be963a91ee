"""The command ``ctxreuse``: one module a group of commands, each importing what it needs when it runs."""
