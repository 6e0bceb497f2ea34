"""Recipes: several training runs described in one file. Each stage begins with fresh weights or with the model of an
earlier stage, optionally changed by surgery. All stages are repeated for each seed; the result is a table, and verdicts
on the claims of the recipe."""

from headway.recipes.recipe import Recipe, Stage, read_recipe
from headway.recipes.report import RecipeReport
from headway.recipes.run import run_recipe

__all__ = ["Recipe", "RecipeReport", "Stage", "read_recipe", "run_recipe"]
