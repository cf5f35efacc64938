//! Sums of products written with letters.

use crate::{Shape, Tensor};
use kiln_device::method;
use kiln_ir::promote;
use std::borrow::Borrow;

/// The sum of products that an equation names, as PyTorch's `einsum`: each letter is an axis; letters that are missing on
/// the right are summed over, a repeated letter is a diagonal, `...` stands for any axes, which broadcast. Without `->`
/// the result has the letters that occur once, in alphabetical order. Operands are multiplied from left to right.
///
/// ```
/// # use kiln_tensor::*;
/// let device = Device::cpu();
/// let (q, k) = (Tensor::ones([2, 3, 4, 8], &device), Tensor::ones([2, 3, 5, 8], &device));
/// let scores = einsum("bhqd,bhkd->bhqk", &[&q, &k]);
/// assert_eq!(scores.shape()[..], [2, 3, 4, 5]);
/// assert_eq!(scores.sum(()).item::<f32>().unwrap(), 2.0 * 3.0 * 4.0 * 5.0 * 8.0);
/// ```
///
/// # Panics
/// If the equation does not fit the operands.
#[track_caller]
pub fn einsum<T: Borrow<Tensor>>(equation: &str, operands: &[T]) -> Tensor {
    let _method = method("einsum");
    let terms = match Terms::read(equation, operands.len()) {
        Ok(terms) => terms,
        Err(why) => panic!("einsum: `{equation}`: {why}"),
    };
    let Some(dtype) = operands.iter().map(|t| t.borrow().dtype().unpacked()).reduce(promote) else {
        panic!("einsum: no operands")
    };
    let mut named = Vec::with_capacity(operands.len());
    for (term, x) in terms.ins.iter().zip(operands) {
        named.push(labelled(equation, term, &x.borrow().to_dtype(dtype)));
    }
    let out = terms.out(equation, &named);
    let mut rest = named.into_iter();
    let Some(mut product) = rest.next() else { panic!("einsum: no operands") };
    let mut later: Vec<Labelled> = rest.collect();
    while !later.is_empty() {
        let next = later.remove(0);
        let kept = |l: &Label| out.contains(l) || later.iter().any(|x| x.labels.contains(l));
        product = contracted(equation, &product, &next, &kept);
    }
    let product = summed(&product, &|l| out.contains(l));
    for label in &out {
        let has = product.labels.contains(label);
        assert!(has, "einsum: `{equation}`: the result has {label} twice or no operand has it");
    }
    let axes: Vec<isize> = out.iter().map(|l| product.place(l) as isize).collect();
    product.x.permute(&axes[..])
}

/// An axis: a letter, or one of those that `...` stands for, counted from the last.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Label {
    Letter(char),
    Dots(usize),
}

impl std::fmt::Display for Label {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Label::Letter(letter) => write!(f, "{letter}"),
            Label::Dots(_) => f.write_str("..."),
        }
    }
}

/// A term of an equation: its letters, and before which of them `...` stands.
#[derive(Default, Debug)]
struct Term {
    letters: Vec<char>,
    dots: Option<usize>,
}

struct Terms {
    ins: Vec<Term>,
    out: Option<Term>,
}

impl Terms {
    fn read(equation: &str, operands: usize) -> Result<Terms, String> {
        let text: String = equation.chars().filter(|c| !c.is_whitespace()).collect();
        let (left, right) = match text.split_once("->") {
            Some((left, right)) => (left, Some(right)),
            None => (&text[..], None),
        };
        let ins = left.split(',').map(Term::read).collect::<Result<Vec<_>, _>>()?;
        if ins.len() != operands {
            return Err(format!("{} terms for {operands} operands", ins.len()));
        }
        let out = right.map(Term::read).transpose()?;
        if let Some(out) = &out
            && let Some(c) = out.letters.iter().find(|&c| out.letters.iter().filter(|d| *d == c).count() > 1)
        {
            return Err(format!("the result has {c} twice"));
        }
        Ok(Terms { ins, out })
    }

    /// The labels of the result.
    #[track_caller]
    fn out(&self, equation: &str, named: &[Labelled]) -> Vec<Label> {
        let dots = named.iter().flat_map(|x| &x.labels).filter_map(|l| match l {
            Label::Dots(i) => Some(i + 1),
            Label::Letter(_) => None,
        });
        let dots = dots.max().unwrap_or(0);
        match &self.out {
            Some(term) => {
                assert!(
                    term.dots.is_some() || dots == 0,
                    "einsum: `{equation}`: the axes of ... are missing in the result"
                );
                term.labels(dots)
            }
            None => {
                let all: Vec<char> = self.ins.iter().flat_map(|term| term.letters.iter().copied()).collect();
                let mut once: Vec<char> =
                    all.iter().copied().filter(|c| all.iter().filter(|d| *d == c).count() == 1).collect();
                once.sort_unstable();
                Term { letters: once, dots: Some(0) }.labels(dots)
            }
        }
    }
}

impl Term {
    fn read(text: &str) -> Result<Term, String> {
        let mut term = Term::default();
        let mut rest = text;
        while let Some(c) = rest.chars().next() {
            if let Some(after) = rest.strip_prefix("...") {
                if term.dots.replace(term.letters.len()).is_some() {
                    return Err("a term has ... twice".into());
                }
                rest = after;
                continue;
            }
            if !c.is_ascii_alphabetic() {
                return Err(format!("`{c}` is not a letter"));
            }
            term.letters.push(c);
            rest = &rest[1..];
        }
        Ok(term)
    }

    /// Its labels where `...` stands for so many axes.
    fn labels(&self, dots: usize) -> Vec<Label> {
        let mut labels: Vec<Label> = self.letters.iter().map(|&c| Label::Letter(c)).collect();
        if let Some(at) = self.dots {
            labels.splice(at..at, (0..dots).rev().map(Label::Dots));
        }
        labels
    }
}

/// A tensor whose axes have names, each once.
struct Labelled {
    x: Tensor,
    labels: Vec<Label>,
}

impl Labelled {
    fn place(&self, label: &Label) -> usize {
        self.labels.iter().position(|l| l == label).unwrap_or(usize::MAX)
    }

    fn extent(&self, label: &Label) -> usize {
        self.x.shape()[self.place(label)]
    }

    fn product(&self, labels: &[Label]) -> usize {
        labels.iter().map(|l| self.extent(l)).product()
    }
}

/// The axes named, a letter that comes twice as the diagonal.
#[track_caller]
fn labelled(equation: &str, term: &Term, x: &Tensor) -> Labelled {
    let dots = x.rank().checked_sub(term.letters.len()).filter(|&n| n == 0 || term.dots.is_some());
    let Some(dots) = dots else {
        panic!("einsum: `{equation}`: shape {:?} for the letters {:?}", x.shape(), term.letters)
    };
    let mut labels = term.labels(dots);
    let mut x = x.clone();
    while let Some((i, j)) = repeated(&labels) {
        let (a, b) = (x.shape()[i], x.shape()[j]);
        assert!(a == b, "einsum: `{equation}`: {} is {a} and {b} of shape {:?}", labels[i], x.shape());
        x = x.diagonal(0, i as isize, j as isize);
        let label = labels.remove(j);
        labels.remove(i);
        labels.push(label);
    }
    Labelled { x, labels }
}

fn repeated(labels: &[Label]) -> Option<(usize, usize)> {
    (0..labels.len()).find_map(|j| Some((labels[..j].iter().position(|l| *l == labels[j])?, j)))
}

/// Summed over what is not kept.
#[track_caller]
fn summed(x: &Labelled, kept: &dyn Fn(&Label) -> bool) -> Labelled {
    let axes: Vec<isize> = (0..x.labels.len()).filter(|&i| !kept(&x.labels[i])).map(|i| i as isize).collect();
    let labels = x.labels.iter().copied().filter(kept).collect();
    // No axes would mean all of them.
    let y = if axes.is_empty() { x.x.clone() } else { x.x.sum(&axes[..]).to_dtype(x.x.dtype()) };
    Labelled { x: y, labels }
}

/// One batched matrix product: `[both, only a, summed]` with `[both, only b, summed]`.
#[track_caller]
fn contracted(equation: &str, a: &Labelled, b: &Labelled, kept: &dyn Fn(&Label) -> bool) -> Labelled {
    let (a, b) = (unstretched(equation, a, b), unstretched(equation, b, a));
    let a = summed(&a, &|l| kept(l) || b.labels.contains(l));
    let b = summed(&b, &|l| kept(l) || a.labels.contains(l));
    let (mut both, mut inner) = (Vec::new(), Vec::new());
    for label in a.labels.iter().filter(|l| b.labels.contains(l)) {
        if kept(label) { both.push(*label) } else { inner.push(*label) }
    }
    let only = |x: &Labelled, other: &Labelled| -> Vec<Label> {
        x.labels.iter().copied().filter(|l| !other.labels.contains(l)).collect()
    };
    let (rows, columns) = (only(&a, &b), only(&b, &a));
    let matrices = |x: &Labelled, outer: &[Label]| {
        let order: Vec<isize> = both.iter().chain(outer).chain(&inner).map(|l| x.place(l) as isize).collect();
        (order, [x.product(&both), x.product(outer), x.product(&inner)])
    };
    let ((a_order, a_shape), (b_order, b_shape)) = (matrices(&a, &rows), matrices(&b, &columns));
    let (a_matrices, b_matrices) = (a.x.permute(&a_order[..]), b.x.permute(&b_order[..]));
    let labels: Vec<Label> = both.iter().chain(&rows).chain(&columns).copied().collect();
    let extents = both.iter().chain(&rows).map(|l| a.extent(l));
    let shape = Shape::collect(extents.chain(columns.iter().map(|l| b.extent(l))));
    let y = match inner.is_empty() {
        // Nothing is summed: an elementwise product.
        true => {
            let (a_shape, b_shape) = ([a_shape[0], a_shape[1], 1], [b_shape[0], 1, b_shape[1]]);
            a_matrices.reshape(a_shape) * b_matrices.reshape(b_shape)
        }
        false => a_matrices.reshape(a_shape).matmul_t(&b_matrices.reshape(b_shape)),
    };
    Labelled { x: y.reshape(shape), labels }
}

/// `a` without the axes of extent 1 that broadcast against longer ones of `b`.
#[track_caller]
fn unstretched(equation: &str, a: &Labelled, b: &Labelled) -> Labelled {
    let (mut labels, mut shape) = (Vec::new(), Vec::new());
    for label in &a.labels {
        let extent = a.extent(label);
        let other = if b.labels.contains(label) { b.extent(label) } else { extent };
        assert!(
            extent == other || extent == 1 || other == 1,
            "einsum: `{equation}`: {label} is {extent} and {other}"
        );
        if extent == other || other == 1 {
            labels.push(*label);
            shape.push(extent);
        }
    }
    Labelled { x: a.x.reshape(shape), labels }
}
