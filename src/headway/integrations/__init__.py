"""headway inside tools that people already have; each module needs its tool, and is imported by name."""
