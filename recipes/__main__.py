"""``python -m recipes`` is ``python -m recipes.main``."""

from recipes.main import main

main()
