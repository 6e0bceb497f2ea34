"""Recipes: several runs in one file. Each begins with fresh weights or with those of an earlier one, changed by
surgery where asked; the whole is repeated for seeds, and ends with one table and with claims that are seen or not."""

from headway.recipes.recipe import Recipe, Stage, read_recipe
from headway.recipes.report import RecipeReport
from headway.recipes.run import run_recipe

__all__ = ["Recipe", "RecipeReport", "Stage", "read_recipe", "run_recipe"]
