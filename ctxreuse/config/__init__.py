"""Settings: what there is to set (``schema``), and how values are found and where they came from (``loading``)."""

from ctxreuse.config.loading import LoadedSettings, config_path, example, load
from ctxreuse.config.schema import (
    BackendConfig,
    BusConfig,
    CloudConfig,
    EdgeConfig,
    EngineConfig,
    LinkConfig,
    LogConfig,
    ModelConfig,
    Setting,
    Settings,
    StoreConfig,
    TakesHints,
    TlsConfig,
    settings,
)

__all__ = [
    "BackendConfig",
    "BusConfig",
    "CloudConfig",
    "EdgeConfig",
    "EngineConfig",
    "LinkConfig",
    "LoadedSettings",
    "LogConfig",
    "ModelConfig",
    "Setting",
    "Settings",
    "StoreConfig",
    "TakesHints",
    "TlsConfig",
    "config_path",
    "example",
    "load",
    "settings",
]
