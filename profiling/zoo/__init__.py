"""The models that conversion is measured on: the list (`models.json`), how an entry becomes a model, one run of one model."""
