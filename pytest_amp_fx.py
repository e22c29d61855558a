"""Nothing: environments that were installed before the plugin became opt-in still load this."""
