"""headway inside other tools; each module needs its tool, and is imported by name."""
