// What is copied, and the button for it.

/** Copies a text. A server that is reached by name and without TLS has no clipboard: false. */
export async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}

/** A button that copies what `text` returns, for nodes that are not Preact's. */
export function copyButton(text) {
  const button = document.createElement("button");
  Object.assign(button, { type: "button", className: "quiet small copy", textContent: "Copy" });
  button.onclick = async () => {
    const isCopied = await copied(text());
    if (!isCopied) getSelection().selectAllChildren(button.parentElement.querySelector("pre"));
    button.textContent = isCopied ? "Copied" : "Selected";
  };
  return button;
}
