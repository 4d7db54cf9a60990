// The view Talk: a playground for the models.

export function mount(section) {
  section.className = "talk";
}
