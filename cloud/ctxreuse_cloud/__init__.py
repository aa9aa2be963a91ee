"""The cloud sidecar: shares contexts with edges over the bus and stands in front of inference servers as a proxy."""
