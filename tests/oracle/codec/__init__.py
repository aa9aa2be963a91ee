"""The coded stream as an executable document: transform, integers and cells of `ctxreuse.codec` in plain numpy."""
