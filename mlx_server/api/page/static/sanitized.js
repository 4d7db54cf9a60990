// The only place where the page reads HTML: what libraries made of a model's text. DOMPurify lets
// through the elements and attributes that are listed here, whatever the libraries wrote.

const { DOMPurify } = globalThis;

const ALLOWED = {
  ALLOWED_TAGS: [
    ..."p blockquote ul ol li table thead tbody tr th td h3 h4 h5 h6 hr br pre".split(" "),
    ..."code em strong s a span div".split(" "),
  ],
  ALLOWED_ATTR: ["href", "start", "class"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ADD_URI_SAFE_ATTR: ["start"],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

export function sanitized(html) {
  return document.importNode(DOMPurify.sanitize(html, ALLOWED), true);
}
