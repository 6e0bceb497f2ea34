"""The commands of the laboratory, which `headway` finds by entry points."""
