//! `#[derive(Module)]`: the fields of a struct, or of each variant of an enum, as the parts of a module.
//!
//! Which fields are modules is not decided here, where only words are known: each field goes through
//! `kiln_nn::derive::Probe`, and the compiler chooses by its type.
#![forbid(unsafe_code)]

use proc_macro2::{Span, TokenStream};
use quote::{format_ident, quote};
use syn::ext::IdentExt;
use syn::{Data, DeriveInput, Error, Field, Fields, GenericParam, Ident, Member, parse_macro_input};

/// Implements `Module` and `Display` for a struct or an enum. Each field that is a module is a part under the field's
/// name: tensors, buffers, layers, other structs that derive `Module`, and lists, arrays, options, boxes, maps and tuples
/// of those. Other fields are left out; numbers and options are shown when the module is printed. `#[module(skip)]` leaves
/// out a field that is a module, `#[module(no_display)]` on the type leaves `Display` to you.
#[proc_macro_derive(Module, attributes(module))]
pub fn module(input: proc_macro::TokenStream) -> proc_macro::TokenStream {
    let input = parse_macro_input!(input as DeriveInput);
    expand(&input, &quote!(::kiln::nn)).unwrap_or_else(Error::into_compile_error).into()
}

/// The same for crates that use `kiln_nn` without `kiln`.
#[proc_macro_derive(NnModule, attributes(module))]
pub fn nn_module(input: proc_macro::TokenStream) -> proc_macro::TokenStream {
    let input = parse_macro_input!(input as DeriveInput);
    expand(&input, &quote!(::kiln_nn)).unwrap_or_else(Error::into_compile_error).into()
}

fn expand(input: &DeriveInput, nn: &TokenStream) -> Result<TokenStream, Error> {
    let variants: Vec<(TokenStream, &Fields, bool)> = match &input.data {
        Data::Struct(data) => vec![(quote!(Self), &data.fields, false)],
        Data::Enum(data) => data
            .variants
            .iter()
            .map(|v| (&v.ident, &v.fields))
            .map(|(name, f)| (quote!(Self::#name), f, true))
            .collect(),
        Data::Union(_) => return Err(Error::new(Span::call_site(), "a union cannot be a module")),
    };
    let (mut shared, mut exclusive) = (Vec::new(), Vec::new());
    for (path, fields, is_variant) in &variants {
        let parts = parts(fields, *is_variant)?;
        let bind = parts.iter().map(|(member, name, _)| quote!(#member: #name));
        let bind = quote!(#(#bind,)*);
        let names = || parts.iter().map(|(_, name, path)| (name, path));
        let calls = names().map(|(name, path)| quote!((&&#nn::derive::Probe(#name)).part(#path, f);));
        shared.push(quote!(#path { #bind .. } => { #(#calls)* }));
        let calls = names().map(|(name, path)| quote!(#nn::derive::ProbeMut(#name).part(#path, f);));
        exclusive.push(quote!(#path { #bind .. } => { #(#calls)* }));
    }
    let name = &input.ident;
    let mut generics = input.generics.clone();
    for param in &mut generics.params {
        if let GenericParam::Type(param) = param {
            param.bounds.push(syn::parse_quote!(#nn::Module));
        }
    }
    let (impls, types, bounds) = generics.split_for_impl();
    let display = (!flag(&input.attrs, "no_display")?).then(|| {
        quote! {
            impl #impls ::core::fmt::Display for #name #types #bounds {
                fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                    #nn::derive::tree(self, f)
                }
            }
        }
    });
    // An enum without variants has nothing to match.
    let body = |arms: &[TokenStream]| match arms.is_empty() {
        true => quote!(match *self {}),
        false => quote!(match self { #(#arms)* }),
    };
    let (shared, exclusive) = (body(&shared), body(&exclusive));
    Ok(quote! {
        #[automatically_derived]
        #[allow(unused_variables, unused_imports, unused_mut)]
        impl #impls #nn::Module for #name #types #bounds {
            fn parts(&self, f: &mut dyn ::core::ops::FnMut(&str, #nn::Part<'_>)) {
                use #nn::derive::{Is as _, IsNot as _, Shows as _};
                #shared
            }
            fn parts_mut(&mut self, f: &mut dyn ::core::ops::FnMut(&str, #nn::PartMut<'_>)) {
                use #nn::derive::{IsMut as _, IsNotMut as _};
                #exclusive
            }
        }
        #display
    })
}

/// Of each field that counts: itself, a variable for it, and the name of its part. What a variant holds alone has the
/// variant's own place.
fn parts(fields: &Fields, is_variant: bool) -> Result<Vec<(Member, Ident, String)>, Error> {
    let alone = is_variant && fields.len() == 1 && matches!(fields, Fields::Unnamed(_));
    let mut parts = Vec::new();
    for (i, (member, field)) in fields.members().zip(fields.iter()).enumerate() {
        let Field { attrs, .. } = field;
        if flag(attrs, "skip")? {
            continue;
        }
        let path = match &member {
            _ if alone => String::new(),
            Member::Named(name) => name.unraw().to_string(),
            Member::Unnamed(index) => index.index.to_string(),
        };
        parts.push((member, format_ident!("__{}", i), path));
    }
    Ok(parts)
}

/// Whether `#[module(word)]` is there; other words are errors.
fn flag(attrs: &[syn::Attribute], word: &str) -> Result<bool, Error> {
    let mut found = false;
    for attr in attrs.iter().filter(|attr| attr.path().is_ident("module")) {
        attr.parse_nested_meta(|meta| match meta.path.is_ident(word) {
            true => {
                found = true;
                Ok(())
            }
            false => Err(meta.error(format!("only `{word}` is known here"))),
        })?;
    }
    Ok(found)
}
