"""Configuration: TOML files as checked records, with names of plugins and of the user's own code in them.

`toml.py` reads texts in bounded memory, and tables as records with all mistakes reported at once; `toml_text.py`
writes and changes the text. `plugins.py` has the kinds of records that a file selects by
name, `plugin_objects.py` the same for records made of objects, and `loaded_plugins.py` the plugins that the owner of a
process names. `user_code.py` imports what `module:name` names, `label_expressions.py` reads expressions over the labels
of clients, and `decoding.py` prepares the types of messages.
"""
