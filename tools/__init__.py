"""The developers' commands behind `normforge VERB`. May import anything; the door alone imports them."""
