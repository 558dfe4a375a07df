"""Parts that several families of strategies share. A new strategy may need none of them."""
