"""Copying a device's contexts to its clouds, in idle time."""
