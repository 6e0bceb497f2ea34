"""The laboratory asks for the headway of its own version: it knows more of it than its public names."""

from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class SameVersion(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        metadata["dependencies"] = [f"headway=={metadata['version']}", *self.config["beside-headway"]]
