"""headway: Transformer models whose attention is declared."""
